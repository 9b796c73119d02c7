"""Time the grouped GEMMs alone, compared with DeepGEMM's or Humming's, on one GPU, in one run.

    python -m benchmarks.layer.grouped_gemm --out benchmarks/results/grouped_gemm-<date>.json
    python -m benchmarks.layer.grouped_gemm --peer humming --out benchmarks/results/grouped_gemm-humming-<date>.json

Routing is uniformly random; with `even` each expert has the same number of rows. Contiguous: the rows of an expert are
consecutive, ours without padding, DeepGEMM's with each expert padded to 128 rows, as its contract requires; the tile
table is made beforehand, as the GEMMs of a layer share it. Masked: one slab of rows per expert, counts on the device;
ours includes the kernel that makes the tile table. A time is the median of CUDA-graph replays after a pause (`burst`,
before the card reaches its power limit) and of 0.4 s of replays without one (`sustained`).

With Humming: the two GEMMs of each layer of `before_after`, with the same number of rows for every expert. Ours are the
masked and the psum op, as users call them. Humming multiplies the same bytes in its indexed and contiguous layouts,
each with the tile that it chooses by itself and with that tile cut to the rows. All of them replay in turns.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layer import humming
from benchmarks.layer.before_after import LAYERS
from benchmarks.layer.operands import Pair, random_fp8, random_scales
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.launches.operands import Rows, Weights
from fp8moe_plugin.ops import (
    devices,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
    m_grouped_fp8_gemm_nt_psum,
)
from fp8moe_plugin.ops.grouped_gemm import BY_INDICES
from fp8moe_plugin.ops.operands import k_major
from fp8moe_plugin.testing import captured, replay_us, time_calls
from warmup.report import installed

EXPERTS, TOPK = 256, 8
SHAPES = {  # of DeepSeek-V3: weights [N, K]
    "ep1 GEMM 1": (4096, 7168),
    "ep1 GEMM 2": (7168, 2048),
    "tp8 GEMM 1": (512, 7168),
    "tp8 GEMM 2": (7168, 256),
}
MASKED_UP_TO = 1024  # tokens
ALIGNMENT = 128  # of DeepGEMM's contiguous layout
EVEN_ROWS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 256)  # per expert, beside Humming
GRAPH_BYTES = 2e9  # of weights that the calls in a graph read, so that its launch does not count
WRONG = 0.01  # relative L2; rounding the result to bfloat16 costs 0.002

OURS = ("masked", "psum")

Calls = dict[str, tuple[Callable[[], Any], torch.Tensor]]  # by name, each with its output, one row after the other


def random_weights(n: int, k: int, experts: int = EXPERTS) -> Pair:
    """Returns the weights of all experts."""
    return random_fp8((experts, n, k)), random_scales((experts, n // 128, k // 128), k)


def row_counts(tokens: int, even: bool) -> list[int]:
    """Rows of each expert."""
    if even:
        return [tokens * TOPK // EXPERTS] * EXPERTS
    ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices.flatten()
    return torch.bincount(ids, minlength=EXPERTS).tolist()


def contiguous_case(counts: list[int], alignment: int) -> tuple[int, torch.Tensor, list[int]]:
    """Returns the number of rows, the expert of each row, and where the rows of each expert begin."""
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
    device = devices.device_of(out)
    assert device is not None, "needs a Hopper GPU"
    plan = device.backend.plan_grouped(BY_INDICES, rows, EXPERTS, n, k, 0, device.multiprocessors)
    scratch = torch.empty(plan.scratch, dtype=torch.uint8, device="cuda")
    scales, *strides = k_major(*a)
    addresses = [tensor.data_ptr() for tensor in (a[0], scales, *b, out, indices, scratch)]
    operands = Rows(addresses[0], rows, k, addresses[1], *strides), Weights(addresses[2], EXPERTS, n, k, addresses[3])
    tiles, gemm = plan.launches(*operands, *addresses[4:])
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


def even_gemms() -> dict[str, tuple[int, int, int]]:
    """Returns the GEMMs that are compared with Humming's: experts, N and K."""
    found = {}
    for name, layer in LAYERS.items():
        found[f"{name} gate_up"] = layer.experts, 2 * layer.intermediate, layer.hidden
        found[f"{name} down"] = layer.experts, layer.hidden, layer.intermediate
    return found


def humming_tunings(config: Any, rows: int) -> dict[tuple[str, str], humming.Tuning]:
    """By layout and by how the tile was chosen."""
    found = {}
    for layout in (humming.INDEXED, humming.CONTIGUOUS):
        default = humming.default_tuning(config, layout, config.num_experts * rows)
        found |= {(layout, label): tuning for label, tuning in humming.tunings(default, rows).items()}
    return found


def our_even_calls(a: Pair, b: Pair, rows: int) -> Calls:
    experts, n, _ = b[0].shape
    counts = torch.full((experts,), rows, dtype=torch.int32, device="cuda")
    slabs = a[0].unflatten(0, (experts, rows)), a[1].unflatten(0, (experts, rows))
    masked_out, psum_out = (torch.zeros(experts * rows, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    slabs_out, ends = masked_out.unflatten(0, (experts, rows)), counts.cumsum(0, dtype=torch.int32)
    return {
        "masked": (lambda: m_grouped_fp8_gemm_nt_masked(slabs, b, slabs_out, counts, rows), masked_out),
        "psum": (lambda: m_grouped_fp8_gemm_nt_psum(a, b, psum_out, ends, rows, 1), psum_out),
    }


def humming_even_calls(gemm: humming.HummingGemm, a: Pair, rows: int) -> Calls:
    config, scales = gemm.config, a[1].contiguous()
    calls: Calls = {}
    for (layout, label), tuning in humming_tunings(config, rows).items():
        out = torch.zeros(len(a[0]), config.shape_n, dtype=torch.bfloat16, device="cuda")
        operands = humming.even_rows(layout, tuning, config.num_experts, rows)
        call = partial(gemm.caller(layout, tuning, len(a[0])), a[0], input_scale=scales, outputs=out, **operands)
        calls[f"humming {layout}, {label} tile of {tuning['block_shape'][0]}"] = call, out
    return calls


def beside_humming(gemm: humming.HummingGemm, b: Pair, rows: int) -> dict[str, dict[str, Any]]:
    """Microseconds and the relative error of each call, or why there is none."""
    experts, _, k = b[0].shape
    a = (random_fp8((experts * rows, k)), random_scales((k // 128, experts * rows), k).t())
    graph_calls = max(1, int(GRAPH_BYTES / b[0].nbytes))

    def capture(named: tuple[Callable[[], Any], torch.Tensor]) -> dict[str, Any]:
        call, out = named
        graph = captured([call] * graph_calls)
        error = max(relative_error(a, b, out, slice(e * rows, (e + 1) * rows), e) for e in (0, 7, experts - 1))
        if not error < WRONG:
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
        return {"graph": graph, "relative_l2": error}

    calls = our_even_calls(a, b, rows) | humming_even_calls(gemm, a, rows)  # keeps what the graphs read
    results = results_or_errors(calls, capture)
    graphs = {name: result.pop("graph") for name, result in results.items() if "graph" in result}
    for name, us in replay_us(graphs).items():
        results[name]["us"] = us / graph_calls
    return results


def line_beside_humming(results: dict[str, dict[str, Any]]) -> str:
    """Ours, and Humming's best."""
    us = {name: result.get("us", math.inf) for name, result in results.items()}
    best = min((name for name in us if name not in OURS), key=us.__getitem__)
    ratio = us[best] / min(us[name] for name in OURS)
    times = ", ".join(f"{name} {us[name]:.1f} us" for name in (*OURS, best))
    errors = (f"; {name}: {result['error']}" for name, result in results.items() if "error" in result)
    return f"{times}: x{ratio:.3f}" + "".join(errors)


def measure_beside_humming(rows_per_expert: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """For one GEMM after the other, a point for each number of rows and call."""
    jobs = []
    for experts, n, k in even_gemms().values():
        config = humming.gemm_config(experts, n, k, humming.W8A8)
        tunings = [humming_tunings(config, rows) for rows in rows_per_expert]
        jobs += humming.kernel_jobs(config, [(layout, t) for found in tunings for (layout, _), t in found.items()])
    print(f"{len(jobs)} kernels of Humming to compile, {humming.compile_ahead(jobs)} failed", flush=True)
    for name, (experts, n, k) in even_gemms().items():
        points = []
        b = random_weights(n, k, experts)
        gemm = humming.HummingGemm(humming.W8A8, b)
        for rows in rows_per_expert:
            results = beside_humming(gemm, b, rows)
            points += [{"gemm": name, "rows": rows, "call": call} | result for call, result in results.items()]
            print(f"{name} {rows:3} rows: {line_beside_humming(results)}", flush=True)
        yield points
        del b, gemm
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", default="64,256,8192", help="masked up to 1024; contiguous above, also with even counts"
    )
    parser.add_argument("--peer", choices=("deepgemm", "humming"), default="deepgemm")
    parser.add_argument("--rows", type=int, nargs="+", default=EVEN_ROWS, help="of each expert, beside Humming")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.peer == "humming":
        humming.check_installed()
        about = {name: installed(name) for name in ("humming-kernels", "fp8moe-plugin")}
        points: list[dict[str, Any]] = []
        for found in measure_beside_humming(args.rows):
            points += found
            if args.out:
                write_report(args.out, about | {"rows": points})
        return
    import vllm.third_party.deep_gemm as deep_gemm

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
