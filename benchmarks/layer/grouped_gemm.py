"""Time the grouped GEMMs alone, compared with DeepGEMM's, on one GPU, in one run.

    python -m benchmarks.layer.grouped_gemm --out benchmarks/results/grouped_gemm-<date>.json

Routing is uniformly random; with `even` each expert has the same number of rows. Contiguous: the rows of an expert are
consecutive, ours without padding, DeepGEMM's with each expert padded to 128 rows, as its contract requires; the tile
table is made beforehand, as the GEMMs of a layer share it. Masked: one slab of rows per expert, counts on the device;
ours includes the kernel that makes the tile table. A time is the median of CUDA-graph replays after a pause (`burst`,
before the card reaches its power limit) and of 0.4 s of replays without one (`sustained`).
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer.operands import Pair, random_fp8, random_scales
from benchmarks.report import write_report
from fp8moe_plugin.ops import backend, m_grouped_fp8_gemm_nt_contiguous, m_grouped_fp8_gemm_nt_masked
from fp8moe_plugin.ops.grouped_gemm import contiguous_launches
from fp8moe_plugin.ops.operands import Rows, Weights, k_major
from fp8moe_plugin.plan import plan_contiguous
from fp8moe_plugin.testing import time_calls

EXPERTS, TOPK = 256, 8
SHAPES = {  # of DeepSeek-V3: weights [N, K]
    "ep1 GEMM 1": (4096, 7168),
    "ep1 GEMM 2": (7168, 2048),
    "tp8 GEMM 1": (512, 7168),
    "tp8 GEMM 2": (7168, 256),
}
MASKED_UP_TO = 1024  # tokens
ALIGNMENT = 128  # of DeepGEMM's contiguous layout


def random_weights(n: int, k: int) -> Pair:
    """The weights of all experts."""
    return random_fp8((EXPERTS, n, k)), random_scales((EXPERTS, n // 128, k // 128), k)


def row_counts(tokens: int, even: bool) -> list[int]:
    """Rows of each expert."""
    if even:
        return [tokens * TOPK // EXPERTS] * EXPERTS
    ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.flatten()
    return torch.bincount(ids, minlength=EXPERTS).tolist()


def contiguous_case(counts: list[int], alignment: int) -> tuple[int, torch.Tensor, list[int]]:
    """The number of rows, the expert of each row, and where the rows of each expert begin."""
    padded = [math.ceil(c / alignment) * alignment for c in counts]
    starts = [sum(padded[:e]) for e in range(EXPERTS)]
    indices = torch.arange(EXPERTS, dtype=torch.int32).repeat_interleave(torch.tensor(padded))
    return sum(padded), indices.cuda(), starts


def relative_error(a: Pair, b: Pair, out: torch.Tensor, rows: slice, expert: int) -> float:
    x = a[0][rows].float().unflatten(-1, (-1, 128)) * a[1][rows].unsqueeze(-1)
    scale = b[1][expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = x.flatten(-2) @ (b[0][expert].float() * scale).T
    return ((out[rows].float() - want).norm() / want.norm()).item()


def contiguous(deep_gemm: Any, b: Pair, n: int, k: int, counts: list[int]) -> dict[str, Any]:
    ours = our_contiguous(b, n, k, counts)
    peer = time_deepgemm_contiguous(deep_gemm, b, counts)
    padded = contiguous_case(counts, ALIGNMENT)[0]
    return ours | {"deepgemm_us": peer[0], "deepgemm_sustained_us": peer[1], "deepgemm_rows": padded}


def our_contiguous(b: Pair, n: int, k: int, counts: list[int]) -> dict[str, Any]:
    rows, indices, starts = contiguous_case(counts, 1)
    a = (random_fp8((rows, k)), random_scales((k // 128, rows), k).t())
    out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    m_grouped_fp8_gemm_nt_contiguous(a, b, out, indices)
    errors = [relative_error(a, b, out, slice(starts[e], starts[e] + counts[e]), e) for e in (0, 7, EXPERTS - 1)]
    assert not out.isnan().any(), "rows were left unwritten"
    device, plan = backend.device_of(out), plan_contiguous(rows)
    assert device is not None, "needs a Hopper GPU"
    scratch = torch.empty(plan.scratch.nbytes, dtype=torch.uint8, device="cuda")
    scales, *strides = k_major(*a)
    addresses = [tensor.data_ptr() for tensor in (a[0], scales, *b, out, indices, scratch)]
    operands = Rows(addresses[0], rows, k, addresses[1], *strides), Weights(addresses[2], EXPERTS, n, k, addresses[3])
    tiles, gemm = contiguous_launches(device, plan, *operands, *addresses[4:])
    device.prepare([tiles])(())
    prepared = device.prepare([gemm])
    ours = time_calls(lambda: prepared(()))
    return {"us": ours[0], "sustained_us": ours[1], "error": max(errors), "rows": rows}


def time_deepgemm_contiguous(deep_gemm: Any, b: Pair, counts: list[int]) -> tuple[float, float]:
    """Microseconds, burst and sustained, with each expert padded as DeepGEMM requires."""
    _, n, k = b[0].shape
    rows, indices, _ = contiguous_case(counts, ALIGNMENT)
    a = (random_fp8((rows, k)), random_scales((k // 128, rows), k).t())
    out = torch.empty((rows, n), dtype=torch.bfloat16, device="cuda")
    return time_calls(lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, indices))


def masked(deep_gemm: Any, b: Pair, n: int, k: int, counts: list[int]) -> dict[str, Any]:
    max_m, expected_m = math.ceil(max(counts) / 64) * 64, math.ceil(sum(counts) / EXPERTS)
    masked_m = torch.tensor(counts, dtype=torch.int32, device="cuda")
    a = (random_fp8((EXPERTS, max_m, k)), random_scales((EXPERTS, k // 128, max_m), k).transpose(1, 2))
    out = torch.zeros((EXPERTS, max_m, n), dtype=torch.bfloat16, device="cuda")
    ours = time_calls(lambda: m_grouped_fp8_gemm_nt_masked(a, b, out, masked_m, expected_m))
    busy = [e for e in range(EXPERTS) if counts[e]]
    sample = (busy[0], busy[len(busy) // 2], busy[-1])
    errors = [relative_error((a[0][e], a[1][e]), b, out[e], slice(0, counts[e]), e) for e in sample]
    peer = time_calls(lambda: deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, masked_m, expected_m))
    gbs = len(busy) * n * k / ours[0] / 1e3
    return {"us": ours[0], "sustained_us": ours[1], "error": max(errors), "weights_gb_s": gbs} | {
        "deepgemm_us": peer[0],
        "deepgemm_sustained_us": peer[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", default="64,256,8192", help="masked up to 1024; contiguous above, also with even counts"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import vllm.third_party.deep_gemm as deep_gemm

    torch.manual_seed(0)
    tokens = [int(t) for t in args.tokens.split(",")]
    cases = [(t, False) for t in tokens] + [(t, True) for t in tokens if t > MASKED_UP_TO]
    rows = []
    for name, (n, k) in SHAPES.items():
        b = random_weights(n, k)
        for tokens, even in cases:
            case, layout = (masked, "masked") if tokens <= MASKED_UP_TO else (contiguous, "contiguous")
            result = case(deep_gemm, b, n, k, row_counts(tokens, even))
            rows.append({"gemm": name, "layout": layout, "tokens": tokens, "even": even} | result)
            burst = result["deepgemm_us"] / result["us"]
            sustained = result["deepgemm_sustained_us"] / result["sustained_us"]
            print(
                f"{name} {layout:10} T={tokens:5} {'even' if even else 'random':6} ours {result['us']:8.1f} us,"
                f" DeepGEMM {result['deepgemm_us']:8.1f}: x{burst:.2f} burst, x{sustained:.2f} sustained,"
                f" error {result['error']:.1e}",
                flush=True,
            )
        del b
        torch.cuda.empty_cache()
    if args.out:
        write_report(args.out, {"deep_gemm": deep_gemm.__version__, "rows": rows})


if __name__ == "__main__":
    main()
