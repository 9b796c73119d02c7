import importlib.util
import json

import pytest
import torch

from fp8moe_plugin import ops
from fp8moe_plugin.bench import layer as bench
from fp8moe_plugin.bench import result as bench_result
from fp8moe_plugin.bench.result import BenchResult, BenchRow
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Experts, Model
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.mxfp4 import PACKED_MXFP4
from fp8moe_plugin.ops.operands import ExpertWeights
from fp8moe_plugin.ops.reference import dequantize_blocks
from fp8moe_plugin.plan.spec import LayerSpec, MoeShape
from tests import helpers as h
from tests.layers.conformance import CLAMPED, OAI, STEP, activated

CPU = torch.device("cpu")
TINY = Experts(layers=1, experts=8, topk=2, hidden=256, intermediate=128)
ON_A_GPU = Experts(layers=1, experts=16, topk=4, hidden=1024, intermediate=512)
SPEC = LayerSpec(MoeShape.of(ON_A_GPU, ON_A_GPU.experts))
DEEPSEEK_V3 = Experts(layers=58, experts=256, topk=8, hidden=7168, intermediate=2048)


def model(experts: Experts) -> Model:
    return Model("Some", experts, dense=(), heads=128, kv_heads=128, vocab=1, ue8m0=False, quantized=True)


def made_up_result() -> BenchResult:
    """Two token counts; cutlass always fails, DeepGEMM once."""
    rows = []
    for tokens, ours, triton in ((1, 40.0, 41.1), (8192, 1547.0, 2446.0)):
        known = {"tokens": tokens, "floor_us": tokens * 0.25 + 10}
        rows += [
            BenchRow(backend="fp8moe", us=ours, relative_l2=0.0436, first_call_s=0.4, **known),
            BenchRow(backend="triton", us=triton, relative_l2=0.0465, first_call_s=1.5, **known),
            BenchRow(
                backend="cutlass", error="UnsupportedError: vLLM's TritonOrCutlassExperts: " + "no " * 50, **known
            ),
        ]
    rows += [
        BenchRow(backend="deepgemm", tokens=1, floor_us=10.25, error="RuntimeError: no nvcc"),
        BenchRow(backend="deepgemm", tokens=8192, floor_us=2058, us=1869.0, relative_l2=0.0465, first_call_s=9.6),
    ]
    about = {"date": "2026-11-21T10:00:00+00:00", "gpu": "NVIDIA H200", "driver": "580.159.04"}
    return BenchResult(**about, torch="2.11.0+cu130", vllm="0.25.1", shape=DEEPSEEK_V3, ue8m0=False, rows=rows)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return bench.random_weights(TINY, CPU)


# The views of a result


def test_a_result_survives_json():
    result = made_up_result()
    text = result.model_dump_json()
    assert BenchResult.model_validate_json(text) == result
    assert json.loads(text)["shape"]["hidden"] == 7168


def test_a_row_of_the_table_is_a_token_count():
    lines = bench_result.table(made_up_result()).splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[:1] == ["tokens"])
    assert " ".join(lines[header].split()) == "tokens fp8moe triton cutlass deepgemm floor best peer / fp8moe error"
    assert lines[header + 1].split() == ["1", "40.0", "41.1", "-", "-", "10.2", "1.03", "0.0436"]
    assert lines[header + 2].split() == ["8192", "1547.0", "2446.0", "-", "1869.0", "2058.0", "1.21", "0.0436"]


def test_the_table_says_what_failed():
    text = bench_result.table(made_up_result())
    assert "cutlass: UnsupportedError: vLLM's TritonOrCutlassExperts: no" in text
    assert "deepgemm at 1 tokens: RuntimeError: no nvcc" in text


def test_a_table_without_our_time_has_no_ratio():
    failed = BenchRow(backend="fp8moe", tokens=1, floor_us=10, error="LaunchError: refused")
    peer = BenchRow(backend="triton", tokens=1, floor_us=10, us=41.1, relative_l2=0.05, first_call_s=1.0)
    text = bench_result.table(made_up_result().model_copy(update={"rows": [failed, peer]}))
    row = next(line for line in text.splitlines() if line.lstrip().startswith("1 "))
    assert row.split() == ["1", "-", "41.1", "10.0", "-", "-"]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_plot_is_drawn_without_a_display(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    bench_result.plot(made_up_result(), path)
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 5000


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        bench_result.plot(made_up_result(), tmp_path / "plot.png")


# What is measured


@pytest.mark.parametrize(
    ("parallel", "experts", "topk", "intermediate"),
    [
        (Parallel(), 256, 8, 2048),
        (Parallel(tp=8), 256, 8, 256),
        (Parallel(tp=2, ep=2), 128, 4, 2048),
        (Parallel(tp=8, ep=8), 32, 1, 2048),
        (Parallel(tp=8, dp=8, ep=64), 4, 1, 2048),
    ],
)
def test_a_rank_computes_its_share_of_a_tokens_experts(parallel, experts, topk, intermediate):
    layer = bench.rank_layer(model(DEEPSEEK_V3), parallel)
    assert (layer.experts, layer.topk, layer.hidden, layer.intermediate) == (experts, topk, 7168, intermediate)


@pytest.mark.parametrize(("tokens", "calls"), [(1, 16), (256, 4), (2048, 1)])
def test_every_call_has_its_own_routing(weights, tokens, calls):
    case = bench.make_case(TINY, weights, tokens)
    assert case.hidden_states.shape == (tokens, 256)
    assert case.hidden_states.dtype == torch.bfloat16
    assert case.expected.shape == (min(tokens, 16), 256)
    assert len(case.routings) == calls
    for topk_weights, ids in case.routings:
        assert topk_weights.shape == ids.shape == (tokens, 2)
        assert (topk_weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        torch.testing.assert_close(topk_weights.sum(-1), torch.ones(tokens))
        assert (ids[:, 0] != ids[:, 1]).all()
        assert ((ids >= 0) & (ids < 8)).all()
    assert len({ids.numpy().tobytes() for _, ids in case.routings}) > calls // 4


def test_skew_gives_few_experts_most_tokens(weights):
    def busiest(skew: float) -> int:
        (_, ids), *_ = bench.make_case(TINY, weights, 512, skew).routings
        return ids.flatten().bincount().max().item()

    assert busiest(3) > 1.5 * busiest(0)


def test_the_float32_layer_agrees_with_the_backend_it_judges(weights):
    case = bench.make_case(TINY, weights, 16)
    layer = h.Layer(*weights.w13, *weights.w2)
    exact = h.layer_reference(case.hidden_states, layer, *case.routings[0], quantized=False)
    assert h.relative_l2(case.expected, exact) < 1e-5
    assert 0.01 < h.relative_l2(ops.fused_moe(case.hidden_states, *layer, *case.routings[0]), case.expected) < 0.06


def test_a_layer_of_gpt_oss_is_timed_without_biases(weights):
    case = bench.make_case(TINY, weights, 16, activation=OAI)
    spec = LayerSpec(MoeShape.of(TINY, TINY.experts), activation=OAI, bias=True)
    assert bench.relative_l2(bench.make_ours(TINY, weights, 16, spec), case) < 0.06


@pytest.mark.parametrize("activation", [CLAMPED, OAI, STEP], ids=str)
def test_the_float32_layer_computes_an_activation(weights, activation):
    x, routing = 20 * torch.randn(8, TINY.hidden), bench.random_routing(torch.Generator(), 8, TINY)
    expected = torch.zeros_like(x)
    for w13, w13_scale, w2, w2_scale, e in zip(*weights.w13, *weights.w2, range(TINY.experts), strict=True):
        gate, up = (x @ dequantize_blocks(w13, w13_scale).T).chunk(2, -1)
        down = activated(gate, up, activation) @ dequantize_blocks(w2, w2_scale).T
        expected += (routing[0] * (routing[1] == e)).sum(1, keepdim=True) * down
    assert h.relative_l2(bench.float32_layer(weights, x, *routing, activation), expected) < 1e-5
    assert h.relative_l2(bench.float32_layer(weights, x, *routing), expected) > 0.1


def test_the_layer_of_per_channel_weights_is_close_to_the_expected_one():
    gen = h.seeded(0, CPU)
    shapes = (2 * TINY.intermediate, TINY.hidden), (TINY.hidden, TINY.intermediate)
    weights = ExpertWeights(*(h.random_weights(gen, TINY.experts, *shape, weights=FP8_CHANNEL) for shape in shapes))
    case = bench.make_case(TINY, weights, 16, stored=FP8_CHANNEL)
    layer = bench.make_ours(TINY, weights, 16, LayerSpec(MoeShape.of(TINY, TINY.experts), FP8_CHANNEL))
    assert bench.relative_l2(layer, case) < 0.06


def test_experts_that_stay_in_mxfp4_are_timed_beside_the_same_in_block_fp8():
    spec = LayerSpec(MoeShape.of(TINY, TINY.experts), PACKED_MXFP4)
    weights, peers = bench.drawn_layer(TINY, spec, CPU)
    case = bench.make_case(TINY, weights, 16, stored=PACKED_MXFP4)
    layers = [bench.make_ours(TINY, weights, 16, spec), *(make(TINY, weights, 16) for make in peers.values())]
    assert list(peers) == [FP8_BLOCK.name]
    assert 0.1 < case.expected.square().mean().sqrt() < 10
    assert all(bench.relative_l2(layer, case) < 0.06 for layer in layers)
    assert h.same_bits(*(layer(case.hidden_states, *case.routings[0]) for layer in layers))
    assert bench.floor_us(TINY, 1, 2, PACKED_MXFP4) < 0.6 * bench.floor_us(TINY, 1, 2)


def test_the_floor_is_the_larger_of_memory_and_arithmetic():
    one_token = (8 * 3 * 7168 * 2048 + 4 * 7168) / 4.3e12 * 1e6  # 8 experts' weights: the memory's
    assert bench.floor_us(DEEPSEEK_V3, 1, 8) == pytest.approx(one_token)
    assert one_token == pytest.approx(81.9, abs=0.1)
    assert bench.floor_us(DEEPSEEK_V3, 8192, 256) == pytest.approx(8192 * 8 * 6 * 7168 * 2048 / 1.25e15 * 1e6)


# Backends that fail, machines that cannot


def test_a_backend_that_fails_leaves_the_others_measured(monkeypatch, weights):
    def unmakable(*args):
        raise ImportError("no module\nnamed deep_gemm")

    def failing(*args):
        return lambda *call: (_ for _ in ()).throw(AssertionError())

    def wrong(*args):
        return lambda x, *routing: torch.full_like(x, float("nan"))

    monkeypatch.setattr(bench, "captured", len)
    monkeypatch.setattr(bench, "replay_us", lambda graphs: {name: 3.0 * calls for name, calls in graphs.items()})
    makers = {
        "unmakable": unmakable,
        "failing": failing,
        "wrong": wrong,
        "fp8moe": bench.make_ours,
    }
    lines = []
    rows = bench.measure(makers, TINY, weights, [1, 256], lines.append)
    assert [(row.tokens, row.backend) for row in rows] == [(tokens, name) for tokens in (1, 256) for name in makers]
    assert [row.error for row in rows[:4]] == [
        "ImportError: no module named deep_gemm",
        "AssertionError:",
        "ArithmeticError: the result is wrong: relative L2 distance nan from float32 math",
        None,
    ]
    assert [row.us for row in rows] == [None, None, None, 3, None, None, None, 3]
    assert rows[7].relative_l2 < 0.06
    assert rows[7].first_call_s > 0
    assert len(lines) == 8
    assert lines[0] == "1 tokens, unmakable: ImportError: no module named deep_gemm"
    assert lines[3] == "1 tokens, fp8moe: 3.0 us"


def test_every_backend_has_run_before_the_first_graph(monkeypatch, weights):
    """vLLM's workspace may move when a backend runs for the first time, under the graphs that exist then."""
    done = []

    def maker(name):
        ours = bench.make_ours(TINY, weights, 1)
        return lambda *made: lambda *call: (done.append(name), ours(*call))[1]

    def captured(calls):
        done.append("capture")

    monkeypatch.setattr(bench, "captured", captured)
    monkeypatch.setattr(bench, "replay_us", lambda graphs: dict.fromkeys(graphs, 1.0))
    bench.measure({"one": maker("one"), "other": maker("other")}, TINY, weights, [1], print)
    assert done == ["one", "other", "capture", "capture"]


@pytest.mark.parametrize(
    ("capability", "vllm", "message"),
    [
        (None, True, r"needs a Hopper GPU.*torch found no usable GPU\. Run it on the machine that serves"),
        ((8, 0), True, r"needs a Hopper GPU.*torch found compute capability 8\.0\. Run it"),
        ((9, 0), False, "vLLM is not installed here.*pip install vllm"),
    ],
)
def test_another_machine_is_refused(monkeypatch, capability, vllm, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if vllm else None)
    with pytest.raises(UnsupportedError, match=message):
        bench.bench_layer(TINY, [1], SPEC, print)


@pytest.mark.gpu
@pytest.mark.parametrize(("stored", "backends"), [(FP8_BLOCK, 5), (FP8_CHANNEL, 3)])
def test_a_gpu_gives_a_row_for_every_backend(stored, backends):
    pytest.importorskip("vllm")
    result = bench.bench_layer(ON_A_GPU, [1, 256], SPEC._replace(weights=stored), report_progress=print)
    assert len(result.rows) == 2 * backends
    for row in result.rows:
        if row.error is None:
            assert row.us > row.floor_us
            assert row.relative_l2 < 0.06, row
    for backend in ("fp8moe", "triton"):
        assert all(row.error is None for row in result.rows if row.backend == backend), result.rows
    assert BenchResult.model_validate_json(result.model_dump_json()) == result
