"""Time a layer whose experts are on several GPUs of one host: what dispatch and combine cost, beside other libraries.

    torchrun --nproc-per-node 4 -m benchmarks.layer.ep_layer --out benchmarks/results/ep_layer-4_gpus-<date>.json
    torchrun --nproc-per-node 4 -m benchmarks.layer.ep_layer --check --out benchmarks/results/ep_replays-<date>.json
    FP8MOE_BACKEND=reference torchrun --nproc-per-node 2 -m benchmarks.layer.ep_layer --device cpu --out FILE

Each rank has an equal share of the experts, and the same number of tokens. The columns, in microseconds:

| column     | dispatch                                                 | combine                                    |
|------------|----------------------------------------------------------|--------------------------------------------|
| `floor`    | none: a lower bound of `layer`, with experts hit evenly  | none                                       |
| `layer`    | none: the tokens of all ranks were gathered before       | none                                       |
| `nccl`     | all-gather of BF16 tokens, as by vLLM's default          | reduce-scatter in BF16                     |
| `nccl_fp8` | all-gather of e4m3 tokens and their scales               | reduce-scatter in BF16                     |
| `push`     | ranks store tokens into each other's windows             | ranks store BF16 sums or rows, added up    |
| `peers`    | as the library does it, see `benchmarks.layer.ep_peers`  | the same                                   |

`*_comm` is dispatch and combine of the column alone. With `--before`, `nccl_before` is `nccl` around the layer of
another version of the package, see `benchmarks.layer.before_after`. A column that fails has its error in place of a
time.

A CUDA graph holds a call for each of several batches. All graphs of a cell, which is a shape with a number of tokens,
take turns. A time is the median over rounds of the slowest rank's. `relative_l2` is the distance from one rank that has
all experts. `repeats` says whether a second replay gave the same bits.

`--check` captures graphs of `push` with different numbers of tokens, replays them in random order, and compares the
bits with those of their first replays. Each number is captured twice: the second time the last rank has one token less.
"""

import argparse
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.layer.before_after import FusedMoe, load_version
from benchmarks.layer.ep_columns import BEFORE, COLUMNS, Call, Calls, Cell, Group, Layer
from benchmarks.layer.ep_peers import PEERS, trial, with_version
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.bench.layer import BYTES_PER_S, FLOP_PER_S, WRONG
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.formats.weight_format import WeightFormat


class Shape(NamedTuple):
    experts: Experts
    stored: WeightFormat = FP8_BLOCK


FLASH, V3, SMALL = Experts(1, 256, 6, 4096, 2048), Experts(1, 256, 8, 7168, 2048), Experts(1, 16, 4, 256, 128)
SHAPES = {"V4-Flash": Shape(FLASH), "V3": Shape(V3), "V4-Flash, MXFP4": Shape(FLASH, PACKED_MXFP4)}
TINY = {"tiny": Shape(SMALL), "tiny, MXFP4": Shape(SMALL, PACKED_MXFP4)}  # for a CPU
TOKENS, TINY_TOKENS = (1, 8, 32, 128, 512, 4096), (1, 5)
CPU_COLUMNS = tuple(name for name in COLUMNS if name != "push")
H100_BYTES_PER_S = 3.0e12  # of a copy, read and written
ROUNDS, TURN_S, MOST_REPLAYS = 7, 0.03, 200  # the last: in a turn
CHECKED_REPLAYS, BURST = 10_000, 8  # in all, and between two comparisons
SEED = 0

Ended = Callable[[], bool]  # whether the time is up, by the clock of rank 0


def floor_us(experts: Experts, stored: WeightFormat, ranks: int, tokens: int) -> float:
    """Returns a lower bound for a rank with its share of experts and pairs, from memory traffic and arithmetic."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    busy = experts.experts / ranks * (1 - (1 - experts.topk / experts.experts) ** (ranks * tokens))
    weights = 3 * experts.hidden * experts.intermediate  # per expert, and multiply-adds per pair
    pairs = tokens * experts.topk
    moved = busy * stored.nbytes(3 * experts.intermediate, experts.hidden) + 3 * pairs * experts.hidden
    memory_s = moved / (H100_BYTES_PER_S if "H100" in name else BYTES_PER_S)
    return max(memory_s, 2 * weights * pairs / FLOP_PER_S) * 1e6


def recorded(calls: Sequence[Call], group: Group) -> Call:
    """Returns what repeats these calls, which have run once: the replay of a CUDA graph, if there is a GPU."""

    def once() -> None:
        for call in calls:
            call()

    group.together(once)
    if group.device.type != "cuda":
        return once
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog calls CUDA meanwhile
            once()

    group.together(capture)
    return graph.replay


def results_of(replay: Call, outs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies of what a replay writes; what it does not write is NaN."""
    for out in outs:
        out.fill_(float("nan"))
    replay()
    return [out.clone() for out in outs]


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a bool on the device."""
    pairs = zip(a, b, strict=True)
    return torch.stack([(x.view(torch.int16) == y.view(torch.int16)).all() for x, y in pairs]).all()


def distance(group: Group, out: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest relative L2 distance of a rank; raises on all ranks if one is wrong."""
    errors = group.all(float((out.float() - expected.float()).norm() / expected.float().norm()) if len(out) else 0.0)
    for error in errors:
        if not error < WRONG:
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from one rank's")
    return max(errors)


def prepared(cell: Cell, name: str) -> dict[str, Any]:
    """Returns a column's `replay` and what is known before it is timed; `calls` keeps what the replay reads."""
    group = cell.layer.group
    calls, outs = found = group.together(lambda: cell.column(name))
    replay = recorded(calls, group)
    result: dict[str, Any] = {"replay": replay, "calls": found}
    if outs:
        first, second = group.together(lambda: [results_of(replay, outs) for _ in range(2)])
        result["repeats"] = all(group.all(bool(same_bits(first, second))))
        if name != "layer":  # whose results are this rank's share
            result["relative_l2"] = round(distance(group, first[0], cell.expected()), 5)
    return result


def timed(replays: dict[str, Call], group: Group) -> dict[str, float]:
    """Returns the microseconds of a replay of each, which take turns."""

    def turns(counts: Iterable[int]) -> list[float]:
        pairs = zip(replays.values(), counts, strict=True)
        return [replay_us(replay, count, group) for replay, count in pairs]

    first = torch.tensor(group.all(turns([1] * len(replays)))).amax(0)
    counts = (TURN_S * 1e6 / first).clamp(1, MOST_REPLAYS).int().tolist()
    rounds = torch.tensor(group.all([turns(counts) for _ in range(ROUNDS)]))
    return dict(zip(replays, rounds.amax(0).median(0).values.tolist(), strict=True))


def replay_us(replay: Call, count: int, group: Group) -> float:
    """Returns the microseconds of one of `count` replays, after one in which the ranks wait for each other."""
    group.synchronize()
    dist.barrier(group.cpu)
    replay()
    if group.device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            replay()
        return (time.perf_counter() - start) * 1e6 / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / count


def measure(name: str, cell: Cell, columns: Sequence[str], peers: dict[str, str | None]) -> dict[str, Any]:
    """Returns the row of a cell. `peers`: why a peer cannot be measured, or None."""
    group, experts = cell.layer.group, cell.layer.experts
    names = [*columns, *(peer for peer, refusal in peers.items() if refusal is None)]
    results = results_or_errors({column: column for column in names}, lambda column: prepared(cell, column))
    replays = {column: result["replay"] for column, result in results.items() if "replay" in result}
    for column, us in timed(replays, group).items():
        results[column]["us"] = round(us / len(cell.batches), 2)
    results |= {peer: {"error": refusal} for peer, refusal in peers.items() if refusal is not None}
    found = {column: result.get("us", result.get("error")) for column, result in results.items()}
    floor = round(floor_us(experts, cell.layer.stored, group.ranks, cell.rows), 1)
    row = {"shape": name, "tokens_per_rank": cell.rows, "floor": floor} | {column: found[column] for column in columns}
    row["peers"] = {with_version(peer): found[peer] for peer in peers}
    for key in ("relative_l2", "repeats"):
        row[key] = {column: result[key] for column, result in results.items() if key in result}
    return row


def check(name: str, layer: Layer, rows: Sequence[int], ended: Ended) -> dict[str, Any]:
    """Returns how many replays ran, and how many compared results of a rank had other bits than the first ones."""
    group = layer.group
    column = "push" if group.device.type == "cuda" else "nccl"
    less = (0, int(group.rank == group.ranks - 1)) if column == "push" else (0,)
    cells = [Cell(layer, most, [layer.random_batch(most - fewer, SEED)]) for most in rows for fewer in less]
    columns: list[Calls] = [group.together(lambda cell=cell: cell.column(column)) for cell in cells]
    replays = [recorded(calls, group) for calls, _ in columns]
    expected = [results_of(replay, calls.outs) for replay, calls in zip(replays, columns, strict=True)]
    errors = [distance(group, *results, cell.expected()) for results, cell in zip(expected, cells, strict=True)]
    order = torch.randint(len(cells), (CHECKED_REPLAYS,), generator=torch.Generator().manual_seed(SEED)).tolist()
    different, done = torch.zeros((), dtype=torch.int64, device=group.device), 0
    for at in range(0, CHECKED_REPLAYS, BURST):
        burst = order[at : at + BURST]
        for which in set(burst):
            columns[which].outs[0].fill_(float("nan"))
        for which in burst:
            replays[which]()
        for which in set(burst):
            different += ~same_bits(columns[which].outs, expected[which])
        done += len(burst)
        if done % (25 * BURST) == 0 and ended():
            break
    unequal = sum(group.all(int(different)))
    found = {"shape": name, "column": column, "rows": list(rows), "replays": done, "unequal": unequal}
    return found | {"relative_l2": round(max(errors), 5)}


def refusals(layer: Layer, tokens: int, peers: Sequence[str]) -> dict[str, str | None]:
    """Returns why each peer cannot be measured, or None."""
    if layer.stored is not FP8_BLOCK:
        return dict.fromkeys(peers, "it needs weights in block FP8")
    group, experts = layer.group, layer.experts
    found = {}
    for peer in peers:
        with socket.socket() as free:
            free.bind(("", 0))
            port = group.all(free.getsockname()[1])[0]
        found[peer] = next(filter(None, group.all(trial(peer, experts, tokens, port))), None)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the program")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES | TINY, help="of one layer")
    parser.add_argument("--tokens", nargs="+", type=int, help="of each rank")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS)
    parser.add_argument("--peers", nargs="*", choices=PEERS)
    parser.add_argument("--before", type=Path, help="folder that holds another version of the package")
    parser.add_argument("--before-bundle", type=Path, help="bundle of its kernels")
    parser.add_argument("--check", action="store_true", help="compare the bits of many replays instead of timing them")
    parser.add_argument("--seconds-in-all", type=float, default=200, help="after which no further cell is begun")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.shapes = options.shapes or list(SHAPES if cuda else TINY)
    options.tokens = options.tokens or list(TOKENS if cuda else TINY_TOKENS)
    options.columns = options.columns or list(COLUMNS if cuda else CPU_COLUMNS)
    options.columns += [BEFORE] * bool(options.before)
    options.peers = list(PEERS if cuda else ()) if options.peers is None else options.peers
    return options


def run(
    options: argparse.Namespace, group: Group, started: float, before: FusedMoe | None = None
) -> list[dict[str, Any]]:
    """Returns the rows, or what the checks found. No CUDA graph, window or buffer of a peer is left."""
    report: dict[str, Any] = {"ranks": group.ranks, "checks" if options.check else "rows": (found := [])}

    def ended() -> bool:
        return group.all(time.monotonic() - started)[0] > options.seconds_in_all

    def add(result: dict[str, Any]) -> None:
        found.append(result)
        if group.rank == 0:
            print(f"{time.monotonic() - started:.0f} s", *(f"{k} {v}" for k, v in result.items()), flush=True)
            write_report(options.out, report)

    for name in options.shapes:
        if ended():
            break
        experts, stored = (SHAPES | TINY)[name]
        layer = Layer(group, experts, max(options.tokens), stored, before)
        if options.check:
            add(check(name, layer, options.tokens, ended))
            continue
        peers = refusals(layer, min(options.tokens), options.peers)
        for rows in options.tokens:
            if ended():
                break
            batches = [layer.random_batch(rows, seed) for seed in range(4 if rows <= 512 else 2)]
            add(measure(name, Cell(layer, rows, batches), options.columns, peers))
            if group.device.type == "cuda":
                torch.cuda.empty_cache()
    return found


def main() -> None:
    options, started = parsed(), time.monotonic()
    before = load_version(options.before, options.before_bundle) if options.before else None
    group = Group(options.device)
    found = run(options, group, started, before)
    group.close()
    if any(result.get("unequal") for result in found):
        raise SystemExit("Some replays gave other bits than the first ones.")


if __name__ == "__main__":
    main()
