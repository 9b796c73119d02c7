"""Check the logits of a sparse-attention indexer on one GPU, then time them next to DeepGEMM's, in one run.

    python -m benchmarks.layer.mqa_logits --out benchmarks/results/mqa_logits-<date>.json

Checks: a matrix of shapes against plain torch in float32, as DeepGEMM's tests do it; a wrong one ends the run. Times:
the median of the kernel's own durations as CUPTI reports them, of calls that take turns with DeepGEMM's, each with
cold L2. Without DeepGEMM, or where it cannot compile its kernels, ours alone are timed.

`equal`: every token has all KV; `causal`: the last chunk of a prompt; `prompt`: a whole one; `parallel`: a rank of
context parallelism, with half of its tokens early in the prompt and half late; `packed`: eight prompts.
"""

import argparse
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer.operands import random_fp8
from benchmarks.report import write_report
from fp8moe_plugin import ops
from fp8moe_plugin.ops import reference
from fp8moe_plugin.testing import calc_diff, kernel_seconds

PAGE = 64
MULTIPROCESSORS = 132
KERNELS = "mqa_"  # in the kernels' names, ours and DeepGEMM's
MOST_DIFFERENCE = {torch.float32: 5e-6, torch.bfloat16: 3e-5}
PEERS = ("deep_gemm", "vllm.third_party.deep_gemm")

Prefill = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]


class Decode(NamedTuple):
    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    longest: int


# ---- inputs --------------------------------------------------------------------------------------------------------


def prefill_case(m: int, n: int, ranges: str, heads: int = 64, dim: int = 128) -> Prefill:
    token = torch.arange(m, device="cuda")
    starts, ends = torch.zeros_like(token), torch.full_like(token, n)
    if ranges in ("causal", "prompt"):
        ends = n - m + token + 1
    elif ranges == "parallel":
        half, ranks = m // 2, n // m
        chunk = torch.where(token < half, ranks // 3, 2 * ranks - 1 - ranks // 3)
        ends = chunk * half + token % half + 1
    elif ranges == "packed":
        starts = token * 8 // m * (n // 8)
        ends = starts + (token % (m // 8) + 1) * n // m
    kv = random_fp8((n, dim)), torch.rand(n, device="cuda") + 0.5
    weights = torch.randn(m, heads, device="cuda")
    return random_fp8((m, heads, dim)), kv, weights, starts.int(), ends.int()


def decode_case(lengths: list[int], next_n: int, heads: int = 64, dim: int = 128) -> Decode:
    batch, longest = len(lengths), max(lengths)
    lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    used = (lens + PAGE - 1) // PAGE
    pages, width = int(used.sum()) + 1, -(-longest // PAGE)
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    table = torch.full((batch, width), 2**30, dtype=torch.int32, device="cuda")
    table[torch.arange(width, device="cuda") < used[:, None]] = order[: int(used.sum())]
    cache = torch.empty(pages, PAGE * (dim + 4), dtype=torch.uint8, device="cuda")
    for part in cache.split(2**14):
        part[:, : PAGE * dim] = random_fp8((len(part), PAGE * dim)).view(torch.uint8)
        part[:, PAGE * dim :] = (torch.rand(len(part), PAGE, device="cuda") + 0.5).view(torch.uint8)
    q, weights = random_fp8((batch, next_n, heads, dim)), torch.randn(batch * next_n, heads, device="cuda")
    context_lens = lens[:, None].repeat(1, next_n)
    return Decode(q, cache.view(pages, PAGE, 1, dim + 4), weights, context_lens, table, longest)


def ragged(batch: int, average: int) -> list[int]:
    gen = torch.Generator().manual_seed(batch)
    return torch.randint(int(0.7 * average), int(1.3 * average), (batch,), generator=gen).tolist()


# ---- checks ----------------------------------------------------------------------------------------------------------


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Over the elements that are not -inf."""
    there = expected > float("-inf")
    return calc_diff(actual[there], expected[there])


def check_prefill(heads: int, dim: int, ranges: str, dtype: torch.dtype) -> float:
    q, kv, weights, starts, ends = prefill_case(520, 3120, ranges, heads, dim)
    strided = torch.cat([weights, weights], 1)[:, :heads]
    expected = torch.empty(len(q), len(kv[0]), device="cuda")
    reference.mqa_logits(q, kv, weights, (starts, ends), expected, False, True)
    logits = ops.fp8_mqa_logits(q, kv, strided, starts, ends, logits_dtype=dtype)
    if not torch.equal(logits == float("-inf"), expected == float("-inf")):
        raise SystemExit("WRONG: -inf is not where it belongs")
    compressed = ops.fp8_mqa_logits(q, kv, weights, starts, ends, 3120, logits_dtype=dtype)
    for i in range(0, len(q), 37):
        start, end = int(starts[i]), int(ends[i])
        if not torch.equal(compressed[i, : end - start], logits[i, start:end]):
            raise SystemExit(f"WRONG: token {i} of the compressed result")
    return difference(logits, expected)


def check_decode(heads: int, dim: int, next_n: int, dtype: torch.dtype) -> float:
    case = decode_case([0, 1, 64, 65, 2500, 0, *ragged(20, 1500)], next_n, heads, dim)
    expected = torch.full((len(case.weights), case.longest), float("-inf"), device="cuda")
    lens = case.context_lens[:, -1]
    reference.paged_mqa_logits(case.q, case.kv_cache, case.weights, lens, case.block_table, expected)
    runs = MULTIPROCESSORS // 2 if next_n == 4 else MULTIPROCESSORS
    schedule = ops.get_paged_mqa_logits_metadata(case.context_lens, PAGE, runs)
    if not torch.equal(schedule, reference.paged_mqa_schedule(case.context_lens, runs)):
        raise SystemExit("WRONG: the schedule")
    logits = ops.fp8_paged_mqa_logits(*case[:5], schedule, case.longest, logits_dtype=dtype)
    again = ops.fp8_paged_mqa_logits(*case[:5], schedule, case.longest, logits_dtype=dtype)
    there = expected > float("-inf")
    if not torch.equal(logits[there], again[there]):
        raise SystemExit("WRONG: two calls differ")
    return difference(logits, expected)


def check_all() -> dict[str, float]:
    """The largest difference of each dtype."""
    worst = dict.fromkeys(MOST_DIFFERENCE, 0.0)
    cases: list[tuple[Callable[..., float], Any]] = [
        (check_prefill, r) for r in ("equal", "causal", "parallel", "packed")
    ]
    cases += [(check_decode, next_n) for next_n in (1, 2, 3, 4)]
    for heads, dim, (check, kind), dtype in itertools.product((32, 64), (32, 64, 128), cases, worst):
        found = check(heads, dim, kind, dtype)
        worst[dtype] = max(worst[dtype], found)
        if not found < MOST_DIFFERENCE[dtype]:
            raise SystemExit(f"WRONG: {check.__name__} H {heads} D {dim} {kind} {dtype}: difference {found:.1e}")
    return {str(dtype).removeprefix("torch."): value for dtype, value in worst.items()}


# ---- times -----------------------------------------------------------------------------------------------------------


def kernel_us(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds that the kernels of each call are busy, of calls that take turns."""
    return {name: seconds * 1e6 for name, seconds in kernel_seconds(calls, rounds, KERNELS).items()}


def import_peer() -> Any:
    """DeepGEMM, if it is installed and can compile a kernel; else None."""
    for name in PEERS:
        try:
            peer = importlib.import_module(name)
            q, kv, weights, starts, ends = prefill_case(64, 256, "equal")
            prefill_of(peer, q, kv, weights, starts, ends)()
            torch.cuda.synchronize()
        except Exception as failure:  # noqa: BLE001 (a peer may be absent or fail in any way; ours counts)
            print(f"{name}: {type(failure).__name__}: {str(failure)[:200]}")
        else:
            print(f"next to {name} {getattr(peer, '__version__', '')}")
            return peer
    return None


def prefill_of(library: Any, *case: Any) -> Callable[[], torch.Tensor]:
    q, *rest = case
    if hasattr(library, "fp8_fp4_mqa_logits"):
        return lambda: library.fp8_fp4_mqa_logits((q, None), *rest, clean_logits=False)
    return lambda: library.fp8_mqa_logits(q, *rest, clean_logits=False)


def decode_of(library: Any, case: Decode, runs: int) -> Callable[[], torch.Tensor]:
    schedule = library.get_paged_mqa_logits_metadata(case.context_lens, PAGE, runs)
    rest = *case[1:5], schedule, case.longest
    if hasattr(library, "fp8_fp4_paged_mqa_logits"):
        return lambda: library.fp8_fp4_paged_mqa_logits((case.q, None), *rest, clean_logits=False)
    return lambda: library.fp8_paged_mqa_logits(case.q, *rest, clean_logits=False)


def time_prefill(libraries: dict[str, Any], m: int, n: int, ranges: str) -> dict[str, Any]:
    case = prefill_case(m, n, ranges)
    starts, ends = case[3:]
    calls = {name: prefill_of(library, *case) for name, library in libraries.items()}
    times = kernel_us(calls, 9 if m * n > 2**26 else 25)
    pairs = int((ends - starts).sum())
    row: dict[str, Any] = {"op": "contiguous", "case": f"{m}x{n} {ranges}", "us": times}
    row["tflops"] = round(pairs * 64 * 128 * 2 / times["ours"] / 1e6)
    if len(calls) > 1:
        columns = torch.arange(n, device="cuda")
        there = (columns >= starts[:, None]) & (columns < ends[:, None])
        row["peer_differs"] = difference(*(call().masked_fill(~there, 0.0) for call in calls.values()))
    return row


def time_decode(libraries: dict[str, Any], lengths: list[int], next_n: int, name: str) -> dict[str, Any]:
    case = decode_case(lengths, next_n)
    runs = MULTIPROCESSORS // 2 if next_n == 4 else MULTIPROCESSORS
    calls = {name: decode_of(library, case, runs) for name, library in libraries.items()}
    times = kernel_us(calls, 25)
    row: dict[str, Any] = {"op": "paged", "case": f"{name} next_n {next_n}", "us": times}
    row["tb_s"] = round(sum(lengths) * (132 + 4 * next_n) / times["ours"] / 1e6, 2)
    if len(calls) > 1:
        there = torch.arange(case.longest, device="cuda") < case.context_lens[:, -1:].repeat_interleave(next_n, 0)
        row["peer_differs"] = difference(*(call().masked_fill(~there, 0.0) for call in calls.values()))
    return row


def time_metadata(libraries: dict[str, Any], batch: int) -> dict[str, Any]:
    lens = torch.tensor(ragged(batch, 8192), dtype=torch.int32, device="cuda")[:, None]

    def call(library: Any) -> Callable[[], torch.Tensor]:
        return lambda: library.get_paged_mqa_logits_metadata(lens, PAGE, MULTIPROCESSORS)

    calls = {name: call(library) for name, library in libraries.items()}
    row: dict[str, Any] = {"op": "metadata", "case": f"B {batch}", "us": kernel_us(calls, 25)}
    if len(calls) > 1:
        row["equal"] = torch.equal(*(run() for run in calls.values()))
    return row


def report(row: dict[str, Any]) -> dict[str, Any]:
    us = row["us"]
    ratio = f"x{us['deepgemm'] / us['ours']:.3f}" if "deepgemm" in us else ""
    times = " ".join(f"{name} {value:8.1f}" for name, value in us.items())
    rest = " ".join(f"{key} {value}" for key, value in row.items() if key not in ("op", "case", "us"))
    print(f"{row['op']:10} {row['case']:28} {times} us {ratio:7} {rest}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    worst = check_all()
    print("right; largest difference", {name: f"{value:.1e}" for name, value in worst.items()}, flush=True)
    peer = import_peer()
    libraries = {"ours": ops} | ({"deepgemm": peer} if peer else {})
    rows = []
    shapes = [(2048, 8192), (2048, 65536)]
    for (m, n), ranges in itertools.product(shapes, ("equal", "causal", "parallel", "packed")):
        rows.append(report(time_prefill(libraries, m, n, ranges)))
    rows.append(report(time_prefill(libraries, 8192, 8192, "prompt")))
    for next_n in (1, 2):
        rows.append(report(time_decode(libraries, [8192] * 256, next_n, "B 256 8192")))
        rows.append(report(time_decode(libraries, ragged(256, 8192), next_n, "B 256 ragged")))
    for batch, length in itertools.product((1, 8, 64), (4096, 32768, 131072)):
        rows.append(report(time_decode(libraries, [length] * batch, 1, f"B {batch} {length}")))
    rows += [report(time_metadata(libraries, batch)) for batch in (1, 256, 4096)]
    for next_n in (3, 4):  # DeepGEMM takes 4 in some versions, 3 in none
        rows.append(report(time_decode({"ours": ops}, [8192] * 256, next_n, "B 256 8192")))
    if options.out:
        write_report(options.out, {"worst": worst, "peer": getattr(peer, "__version__", None), "rows": rows})


if __name__ == "__main__":
    main()
