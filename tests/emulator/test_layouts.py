"""GEMMs of a K that ends inside a block, and of rows that are apart, on the emulator."""

import pytest
import torch

from fp8moe_plugin import deep_gemm, ops
from fp8moe_plugin.plan.sm90 import dense
from fp8moe_plugin.plan.spec import Output
from fp8moe_plugin.testing import calc_diff
from tests import helpers as h
from tests.emulator.device import Device
from tests.emulator.inputs import assert_close
from tests.ops.test_layouts import operands, product, spread

CPU = torch.device("cpu")
SIZES = (70, 0, 129)
seeds = pytest.mark.parametrize("seed", [1, 2])
depths = pytest.mark.parametrize("k", [16, 240, 576])


@seeds
@depths
@pytest.mark.parametrize("kernel", ["few_rows", "tiled", "grouped"])
def test_a_dense_gemm(monkeypatch: pytest.MonkeyPatch, emulator: Device, kernel: str, k: int, seed: int) -> None:
    plans = {
        "few_rows": lambda m, n, _: dense.few_rows(m, n, 1),
        "tiled": lambda m, n, sms: dense.tiled(m, n, 64, 96, sms),
        "grouped": lambda m, n, sms: dense.grouped(m, n, Output.BF16, sms),
    }
    h.force_dense(monkeypatch, plans[kernel])
    gen, m, n = h.seeded(seed, CPU), 17 if kernel == "few_rows" else 150, 136
    (q, q_scales), (w, w_scales) = operands(gen, m, k=k, weights=False), operands(gen, n, k=k, weights=True)
    a, b, out = (spread(q), q_scales), (spread(w), h.column_major(w_scales)), torch.empty(m, n, dtype=torch.bfloat16)
    emulator.execute(seed, lambda: ops.fp8_gemm_nt(a, b, out))
    assert_close(out, product(a, b), f"{kernel} of K {k}")


@seeds
@depths
@pytest.mark.parametrize("expected_m", [16, 128])
def test_groups_of_rows(emulator: Device, expected_m: int, k: int, seed: int) -> None:
    """By count, by end and by index, whose rows of no group are zeros."""
    gen, n, room = h.seeded(seed, CPU), 136, 192
    (q, q_scales), (w, w_scales) = operands(gen, 3, room, k=k, weights=False), operands(gen, 3, n, k=k, weights=True)
    counts = torch.tensor(SIZES, dtype=torch.int32)
    here = torch.arange(room) < counts[:, None]
    a, b = (spread(q), q_scales), (w, h.column_major(w_scales))
    flat = a[0].flatten(0, 1), q_scales.flatten(0, 1)
    indices = torch.where(here, torch.arange(3)[:, None], -1).int().flatten()
    ends = torch.tensor([70, 192, 321], dtype=torch.int32)  # of groups 192 rows apart, the second of no rows
    by_count, by_index, by_end = h.poisoned(3, 3, room, n, dtype=torch.bfloat16, device=CPU)

    def run() -> None:
        ops.m_grouped_fp8_gemm_nt_masked(a, b, by_count, counts, expected_m)
        ops.m_grouped_fp8_gemm_nt_contiguous(flat, b, by_index.flatten(0, 1), indices)
        ops.m_grouped_fp8_gemm_nt_psum(flat, b, by_end.flatten(0, 1), ends, expected_m, room)

    emulator.execute(seed, run)
    expected = product(a, b)
    assert_close(by_count[here], expected[here], "by count")
    assert_close(by_index[here], expected[here], "by index")
    assert (by_index[~here] == 0).all()
    assert h.untouched(by_count[~here])
    by_end = by_end.flatten(0, 1)
    assert_close(by_end[:70], expected[0, :70], "the first group by end")
    last = product((flat[0][192:321], flat[1][192:321]), (b[0][2], b[1][2]))
    assert_close(by_end[192:321], last, "the last group by end")
    assert h.untouched(torch.cat([by_end[70:192], by_end[321:]]))


@seeds
@pytest.mark.parametrize("k", [144, 384])
def test_a_gradient_of_any_k(emulator: Device, k: int, seed: int) -> None:
    gen, (m, n) = h.seeded(seed, CPU), (150, 144)
    (q, q_scales), b = operands(gen, m, k=k, weights=False), operands(gen, n, k=k, weights=False)
    a, c = (spread(q), q_scales), torch.randn(m, n, generator=gen)
    out = c.clone()
    emulator.execute(seed, lambda: deep_gemm.fp8_gemm_nt(a, b, out, c=out, recipe=(1, 1, 128)))
    x, y = (v.double() * s.double().repeat_interleave(h.GROUP, -1)[:, :k] for v, s in (a, b))
    assert calc_diff(out, x @ y.T + c.double()) < 1e-9
