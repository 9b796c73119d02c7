"""Calls of `k_grouped_fp8_gemm_nt_contiguous`, and what they must give."""

from typing import NamedTuple

import torch

from fp8moe_plugin import ops
from tests import helpers as h

FLOAT32_ERROR = 1e-5  # of an element, in root mean squares
TENSOR_CORE_ERROR = 4e-3  # the same; tensor cores sum up 128 products with fewer bits than float32 has


class Gradients(NamedTuple):
    a: h.Quantized
    b: h.Quantized
    c: torch.Tensor
    ks: list[int]

    def run(self, d: torch.Tensor, c: torch.Tensor, layout: torch.Tensor | None = None) -> torch.Tensor:
        if layout is None:
            layout = torch.tensor(self.ks, dtype=torch.int32, device=d.device)
        return ops.k_grouped_fp8_gemm_nt_contiguous(self.a, self.b, d, self.ks, layout, c)

    def expected(self) -> torch.Tensor:
        """float64 `[G, M, N]`."""
        (m, n), begin, results = self.c.shape[1:], 0, []
        for group, k in enumerate(self.ks):
            blocks = slice(begin // h.GROUP, (begin + k) // h.GROUP)
            x, y = (
                pair[0][rows * begin : rows * (begin + k)].view(rows, k).double()
                * pair[1][:, blocks].double().repeat_interleave(h.GROUP, -1)
                for pair, rows in ((self.a, m), (self.b, n))
            )
            results.append(self.c[group].double() + x @ y.T)
            begin += k
        return torch.stack(results)

    def assert_right(self, d: torch.Tensor) -> None:
        expected = self.expected()
        size = expected.square().mean((-1, -2), keepdim=True).sqrt()
        most = TENSOR_CORE_ERROR if d.is_cuda else FLOAT32_ERROR
        wrong = ~((d.double() - expected).abs() <= expected.abs() * FLOAT32_ERROR + size * most)
        for at in map(tuple, wrong.nonzero().tolist()):
            found = f"{int(wrong.sum())} of {d.numel()} elements are wrong"
            raise AssertionError(f"{found}, the first at {at}: {d[at]:.6g}, not {expected[at]:.6g}")


def gradients(gen: torch.Generator, m: int, n: int, ks: list[int]) -> Gradients:
    """Operands as DeepGEMM's tests have them, scales K-major; C is as large as the products."""
    operands = []
    for rows in (m, n):
        values, scales = h.random_quantized(gen, rows, sum(ks))
        operands.append((values.flatten(), h.column_major(scales)))
    c = torch.randn(len(ks), m, n, generator=gen, device=gen.device) * max(ks, default=0) ** 0.5
    return Gradients(*operands, c, ks)
