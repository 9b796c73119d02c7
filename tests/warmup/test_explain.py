"""`explain`: the figures of long steps equal the sums over all tiles, but take no longer than those of short steps."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.plan.sm90 import tiles
from tests.checkpoint.published import described
from tests.checkpoint.test_model import V3, describe
from tests.helpers import environment
from warmup import explain as explanation
from warmup.__main__ import main
from warmup.explain import scratch_bytes
from warmup.memory import weight_shapes
from warmup.options import MAX_CAPTURE_SIZES, parse
from warmup.target import MAX_COUNT

V3_EXPERTS = 59  # layers, one of them for multi-token prediction
TILES = (tiles.FEW_ROWS, tiles.PACKED_FEW_ROWS, tiles.PACKED_WIDE, tiles.MANY_ROWS, tiles.SHARED)


@given(st.lists(st.integers(0, 4000), max_size=40), st.sampled_from(TILES))
def test_the_rows_of_all_experts_are_those_of_each_added_up(rows: list[int], tile: tiles.RowTile) -> None:
    added_up = sum(tiles.computed_rows(count, tile) for count in rows)
    assert explanation._multiplied(np.array(rows, dtype=int), tile) == added_up


@pytest.mark.parametrize("parallel", [Parallel(8), Parallel(1, 8, ep=8)], ids=str)
def test_the_longest_step_takes_no_longer_than_a_short_one(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, parallel: Parallel
) -> None:
    """Counts tiles instead of measuring time."""
    looked_at = []

    def counted(rows: int, tile: tiles.RowTile) -> int:
        looked_at.append(rows // tile.rows + 1)
        return tiles.computed_rows(rows, tile)

    monkeypatch.setattr(explanation, "computed_rows", counted)
    found = explanation.explain(models["DeepSeek-V3"], parallel, MAX_COUNT, (MAX_COUNT - 1,))
    assert 0 < sum(looked_at) < 50_000
    assert [step.padding for step in found.steps] == pytest.approx([0, 0], abs=0.01)


def test_too_many_capture_sizes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Each size is a step to compute, so their number bounds the time."""

    def arguments(count: int) -> list[str]:
        return ["explain", "--model", "x", "--cudagraph-capture-sizes", *map(str, range(1, count + 1))]

    assert len(parse(arguments(MAX_CAPTURE_SIZES)).capture_sizes) == MAX_CAPTURE_SIZES
    with pytest.raises(SystemExit) as caught:
        parse(arguments(MAX_CAPTURE_SIZES + 1))
    assert caught.value.code == 2
    assert "--cudagraph-capture-sizes accepts at most 1024 sizes, not 1025" in capsys.readouterr().err


def test_names_of_unquantized_layers_without_effect_cost_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    quantization = V3["quantization_config"] | {"modules_to_not_convert": ["lm_head", "self_attn.o_proj"]}
    assert main(["explain", "--model", str(describe(tmp_path, V3, quantization_config=quantization))]) == 0
    told = capsys.readouterr().err
    assert told.startswith("warning: in the checkpoint's list of unquantized layers, ['self_attn.o_proj'] are not full")
    assert told.count("\n") == 1


def test_layers_of_the_engine_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    """As when serving, `FP8MOE_FALLBACK=forbid` refuses them. Without experts of ours there are no kernels for them."""
    folder = describe(tmp_path, V3, hidden_act="swigluoai", swiglu_limit=1e39)
    why = "the model's experts have the activation swigluoai_uninterleave with limit 1e+39"
    for command in ("explain", "list", "verify"):
        assert main([command, "--model", str(folder)]) == int(command == "verify")
        shown = capsys.readouterr()
        warning = f"warning: with --tp 1, vLLM's own kernels compute experts ({V3_EXPERTS} layers): {why}"
        assert shown.err.startswith(warning), shown.err
        assert "gate_up" not in shown.out.replace("gate_up_proj", "")
    for command in ("explain", "list", "doctor"):
        with environment("FP8MOE_FALLBACK", "forbid"):
            assert main([command, "--model", str(folder)]) == 1
        shown = capsys.readouterr()
        refusal = " ".join((shown.out + shown.err).split())
        assert "experts have the activation swigluoai_uninterleave with limit 1e+39" in refusal
    assert main(["bench", "--model", str(folder)]) == 1
    assert "bench needs a model whose layers our kernels support, but with --tp 1, vLLM" in capsys.readouterr().err


def test_a_shared_expert_with_a_gate_is_counted_where_our_router_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    folder, line = describe(tmp_path, described("Qwen3.6-35B-A3B-FP8")), "the shared expert is one more expert"
    model, scratch = read_model(folder), []
    for router in "1", "0":
        with environment("FP8MOE_ROUTER", router):
            assert main(["explain", "--model", str(folder)]) == 0
            assert (line in capsys.readouterr().out) == (router == "1")
            scratch.append(scratch_bytes(model, Parallel(), 4096))
    assert scratch[0] == pytest.approx(scratch[1] * 9 / 8, rel=0.05)


def test_memory_of_the_engines_layers(tmp_path: Path) -> None:
    """They are not padded, and stay in BF16 where the checkpoint is not quantized."""
    odd = {"hidden_size": 7232, "moe_intermediate_size": 2048}
    for quantization, size in ((V3["quantization_config"], 1 + 4 / 128**2), (None, 2)):
        model = read_model(describe(tmp_path, V3, **odd, quantization_config=quantization))
        found = [shape for shape in weight_shapes(model, Parallel(16)) if shape.name.startswith("experts.w2")]
        assert [shape.bytes for shape in found] == [pytest.approx(59 * 256 * 128 * 7232 * size, rel=1e-2)]
        assert scratch_bytes(model, Parallel(16), 64) == 0


def test_unquantized_experts_are_counted_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantization = V3["quantization_config"] | {"modules_to_not_convert": [r"re:.*mlp\.experts"]}
    folder = describe(tmp_path, V3, quantization_config=quantization)
    assert main(["explain", "--model", str(folder), "--tp", "16"]) == 0
    printed = capsys.readouterr().out
    assert "The checkpoint keeps all experts unquantized" in printed
    model, whole = read_model(folder), read_model(describe(tmp_path, V3))
    found = {shape.name: shape.bytes for shape in weight_shapes(model, Parallel(16)) if "expert" in shape.name}
    assert found["experts.w13 (BF16)"] == 59 * 256 * 2 * 128 * 7168 * 2
    assert found["experts.w2 (BF16)"] == 59 * 256 * 128 * 7168 * 2
    assert not {"experts.w13", "experts.w2"} & found.keys()
    assert scratch_bytes(model, Parallel(16), 64) == 0 < scratch_bytes(whole, Parallel(16), 64)
    assert main(["explain", "--model", str(folder), "--gpu", "h200", "--gpus", "16", "--max-model-len", "4096"]) == 0


def test_a_family_that_is_not_known_costs_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    assert main(["explain", "--model", str(describe(tmp_path, V3, model_type="dots3"))]) == 0
    told = capsys.readouterr().err
    assert told.startswith("warning: models of the type 'dots3' are not known to fp8moe-warmup")
    assert told.count("\n") == 1
