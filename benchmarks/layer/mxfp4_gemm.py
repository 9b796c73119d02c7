"""Time the GEMMs of experts in packed MXFP4 alone, beside block FP8 and Humming's GEMMs, in turns on one GPU.

    python -m benchmarks.layer.mxfp4_gemm --out benchmarks/results/mxfp4_gemm-<date>.json

Each expert has the same number of rows. Ours are the launches of a layer of as many tokens with one expert each, with
the kernels and tiles of its plan: `gate_up`, with SwiGLU and the quantization of its result, and `down`, to bfloat16
rows. Neither overlaps with another kernel. `us` is of packed MXFP4, `fp8_us` of block FP8, which represents these
weights exactly. `tb_s` and `fp8_tb_s` count the bytes of the weights with their scales.

`peers` are Humming's GEMMs in W4A8, in its indexed and contiguous layouts, each with the tile that it chooses by itself
and with that tile cut to the rows. They write bfloat16 rows, of `gate_up` without SwiGLU: `humming SwiGLU` is the
kernel that follows, which also quantizes. `relative_l2` is the distance from float32 math, of ours after the whole
layer on unquantized activations.
"""

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.layer import humming
from benchmarks.layer.grouped_gemm import (
    GRAPH_BYTES,
    WRONG,
    Calls,
    humming_even_calls,
    humming_tunings,
    relative_error,
)
from benchmarks.layer.mxfp4_layer import IN_FP8, SHAPES
from benchmarks.layer.operands import random_fp8, random_scales
from benchmarks.report import results_or_errors, write_report
from fp8moe_plugin.bench.layer import REFERENCE_TOKENS, float32_layer
from fp8moe_plugin.bench.layer import WRONG as WRONG_LAYER
from fp8moe_plugin.bench.packed import in_block_fp8, packed, random_mxfp4
from fp8moe_plugin.bench.result import OURS
from fp8moe_plugin.checkpoint.shapes import Experts
from fp8moe_plugin.formats.activation import Activation
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.launches.operands import LayerAddresses
from fp8moe_plugin.ops import devices, workspace
from fp8moe_plugin.ops.operands import ExpertWeights, Quantized
from fp8moe_plugin.ops.signature import addresses_of
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from fp8moe_plugin.testing import captured, replay_us
from warmup.report import installed

ROWS = (1, 4, 8, 16, 32, 64)  # of each expert
GEMMS = {"gate_up": "gate_up", "down": "grouped_gemm"}  # beginnings of the names of their kernels
CALLS = 4  # at least, in a graph, so that its launch does not count
SWIGLU = "humming SwiGLU"


class Case(NamedTuple):
    """Tokens with one expert each, and what float32 math makes of the first of them."""

    x: torch.Tensor  # bfloat16 [T, H]
    ids: torch.Tensor  # int32 [T, 1]
    expected: torch.Tensor  # float32 [min(T, REFERENCE_TOKENS), H]


def make_case(experts: Experts, rows: int, in_fp8: ExpertWeights, activation: Activation) -> Case:
    """Returns random tokens; each expert gets `rows` of them."""
    device = in_fp8.w2[0].device
    tokens = experts.experts * rows
    x = torch.randn(tokens, experts.hidden, device=device).bfloat16()
    ids = (torch.randperm(tokens, device=device) % experts.experts).int().unsqueeze(1)
    first, of_first = x[:REFERENCE_TOKENS], ids[:REFERENCE_TOKENS]
    expected = float32_layer(in_fp8, first, torch.ones(of_first.shape, device=device), of_first, activation)
    return Case(x, ids, expected)


class OurGemm:
    """One GEMM of a layer whose launches have all run, one after the other.

    It has scratch memory of its own: GEMM 1 counts in it what GEMM 2 of the layer waits for.
    """

    def __init__(self, gemm: str, spec: LayerSpec, weights: ExpertWeights, case: Case) -> None:
        device = devices.device_of(case.x)
        assert device is not None, "needs a Hopper GPU"
        plan = device.backend.plan_layer(spec, len(case.x), device.multiprocessors)
        self._case, self._out = case, torch.empty_like(case.x)
        ones = torch.ones(case.ids.shape, device=case.x.device)
        routed = ones, case.ids, None, self._out, workspace.scratch(plan.scratch, case.x)
        self._tensors = case.x, None, *weights.w13, *weights.w2, None, None, *routed  # keeps what the kernels read
        launches = plan.launches(LayerAddresses(*addresses_of(self._tensors)), False)
        runs = [device.prepare([launch._replace(pdl=False)]) for launch in launches]
        for run in runs:
            run(())
        sources = [launch.key.source for launch in launches]
        at = next(i for i, source in enumerate(sources) if source.startswith(GEMMS[gemm]))
        self.kernel, self._run, self._rest = sources[at], runs[at], runs[at + 1 :]

    def __call__(self) -> None:
        self._run(())

    def result(self) -> torch.Tensor:
        """Returns the layer's result, bfloat16 `[T, H]`, from what the GEMM has written last."""
        self._out.fill_(float("nan"))
        for run in self._rest:
            run(())
        return self._out

    def relative_l2(self) -> float:
        expected = self._case.expected
        return float((self.result()[: len(expected)].float() - expected).norm() / expected.norm())


class Peer:
    """Humming's kernels for one GEMM."""

    def __init__(self, gemm: str, experts: Experts, stored: ExpertWeights, activation: Activation) -> None:
        self._k = experts.hidden if gemm == "gate_up" else experts.intermediate
        self._gemm = humming.HummingGemm(humming.W4A8, stored.w13 if gemm == "gate_up" else stored.w2)
        self._swiglu = swiglu(experts, activation) if gemm == "gate_up" else None

    def calls(self, rows: int) -> tuple[Calls, Quantized]:
        """Returns the calls, and the activations that all of them read."""
        config = self._gemm.config
        count = config.num_experts * rows
        a = (random_fp8((count, self._k)), random_scales((self._k // 128, count), self._k).t())
        calls = humming_even_calls(self._gemm, a, rows)
        if self._swiglu:
            gate_up = torch.randn(count, config.shape_n, device="cuda").bfloat16()
            calls[SWIGLU] = partial(self._swiglu, gate_up), gate_up
        return calls, a


def swiglu(experts: Experts, activation: Activation) -> Callable[[torch.Tensor], Any]:
    """Returns Humming's kernel between the two GEMMs."""
    from humming.forward import may_process_input

    down = humming.gemm_config(experts.experts, experts.hidden, experts.intermediate, humming.W4A8)
    return partial(may_process_input, down, **humming.swiglu(activation))


def compile_humming(shapes: Sequence[str], rows: Sequence[int]) -> None:
    """Compile Humming's kernels in parallel; one after the other, at its first call, takes minutes."""
    jobs: list[Callable[[], Any]] = []
    for experts, activation, _ in (SHAPES[name] for name in shapes):
        gate_up = 2 * experts.intermediate
        row = torch.zeros(1, gate_up, dtype=torch.bfloat16, device="cuda")
        jobs.append(partial(swiglu(experts, activation), row))
        for n, k in ((gate_up, experts.hidden), (experts.hidden, experts.intermediate)):
            config = humming.gemm_config(experts.experts, n, k, humming.W4A8)
            chosen = [pair for count in rows for pair in humming_tunings(config, count).items()]
            jobs += humming.kernel_jobs(config, [(layout, tuning) for (layout, _), tuning in chosen])
    print(f"{len(jobs)} kernels of Humming to compile, {humming.compile_ahead(jobs)} failed", flush=True)


def capture_ours(make: Callable[[], OurGemm], calls: int) -> dict[str, Any]:
    gemm = make()
    graph = captured([gemm] * calls)
    graph.replay()
    if not (error := gemm.relative_l2()) < WRONG_LAYER:  # true for NaN, too
        raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
    return {"graph": graph, "kept": gemm, "relative_l2": round(error, 4), "kernel": gemm.kernel}


def capture_peers(peer: Peer, b: Quantized, rows: int, calls: int) -> dict[str, dict[str, Any]]:
    named, a = peer.calls(rows)

    def capture(name: str) -> dict[str, Any]:
        call, out = named[name]
        found = {"graph": captured([call] * calls), "kept": (call, out)}
        if name == SWIGLU:
            return found
        last = len(b[0]) - 1
        error = max(relative_error(a, b, out, slice(e * rows, (e + 1) * rows), e) for e in (0, last // 2, last))
        if not error < WRONG:
            raise ArithmeticError(f"the result is wrong: relative L2 distance {error:.2g} from float32 math")
        return found | {"relative_l2": round(error, 4)}

    return results_or_errors({name: name for name in named}, capture)


def measure(
    ours: dict[str, Callable[[], OurGemm]], peer: Peer | None, b: Quantized, rows: int, calls: int
) -> dict[str, dict[str, Any]]:
    """Returns the microseconds and errors of all calls, or why a call has none.

    Args:
        b: the weights in block FP8.
        calls: of each graph.
    """
    results = results_or_errors(ours, partial(capture_ours, calls=calls))
    if peer:
        results |= capture_peers(peer, b, rows, calls)
    times = replay_us({name: result.pop("graph") for name, result in results.items() if "graph" in result})
    for name, us in times.items():
        del results[name]["kept"]  # what the graphs read
        results[name]["us"] = round(us / calls, 2)
    return results


def point(results: dict[str, dict[str, Any]], nbytes: dict[str, int]) -> dict[str, Any]:
    """Returns the figures of a row of the report. `nbytes`: of the weights of ours and in block FP8."""
    found: dict[str, Any] = {}
    for prefix, name in (("", OURS), ("fp8_", IN_FP8)):
        result = results.pop(name)
        found[f"{prefix}us"] = us = result.get("us", result.get("error"))
        if "us" in result:
            found |= {f"{prefix}tb_s": round(nbytes[name] / us / 1e6, 3), f"{prefix}kernel": result["kernel"]}
            found[f"{prefix}relative_l2"] = result["relative_l2"]
    errors = {name: result["relative_l2"] for name, result in results.items() if "relative_l2" in result}
    peers = {name: result.get("us", result.get("error")) for name, result in results.items()}
    return found | {"peers": peers, "peers_relative_l2": errors}


def measure_shape(name: str, rows: Sequence[int], with_humming: bool) -> list[dict[str, Any]]:
    experts, activation, ue8m0 = SHAPES[name]
    experts = replace(experts, topk=1)
    in_fp8 = LayerSpec(MoeShape.of(experts, experts.experts), ue8m0=ue8m0, activation=activation)
    stored = random_mxfp4(experts, torch.device("cuda"))
    forms = {
        OURS: (in_fp8._replace(weights=PACKED_MXFP4), packed(stored)),
        IN_FP8: (in_fp8, in_block_fp8(stored)),
    }
    points = []
    for gemm in GEMMS:
        peer = Peer(gemm, experts, stored, activation) if with_humming else None
        of_gemm = {form: weights.w13 if gemm == "gate_up" else weights.w2 for form, (_, weights) in forms.items()}
        nbytes = {form: sum(tensor.nbytes for tensor in weight) for form, weight in of_gemm.items()}
        calls = max(CALLS, int(GRAPH_BYTES / nbytes[OURS]))
        for count in rows:
            case = make_case(experts, count, forms[IN_FP8][1], activation)
            ours = {form: partial(OurGemm, gemm, *layer, case) for form, layer in forms.items()}
            found = point(measure(ours, peer, of_gemm[IN_FP8], count, calls), nbytes)
            points.append({"shape": name, "gemm": gemm, "rows_per_expert": count} | found)
            shown = {key: found.get(key) for key in ("us", "tb_s", "fp8_us", "fp8_tb_s", "peers")}
            print(name, gemm, count, *(f"{key} {value}" for key, value in shown.items()), flush=True)
            torch.cuda.empty_cache()
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of each expert")
    parser.add_argument("--out", type=Path, required=True, help="the report, rewritten after each shape")
    options = parser.parse_args()
    torch.manual_seed(0)
    with_humming = importlib.util.find_spec("humming") is not None
    if with_humming:
        compile_humming(options.shapes, options.rows)
    about = {name: installed(name) for name in ("humming-kernels", "fp8moe-plugin")}
    points: list[dict[str, Any]] = []
    for name in options.shapes:
        points += measure_shape(name, options.rows, with_humming)
        write_report(options.out, about | {"rows": points})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
