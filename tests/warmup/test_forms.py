"""The forms of experts in MXFP4: their memory, and which of them `explain` recommends."""

from pathlib import Path

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.checkpoint.parallel import Parallel
from fp8moe_plugin.checkpoint.shapes import Model
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from tests.checkpoint.published import described
from tests.checkpoint.test_model import describe
from tests.helpers import environment
from warmup import explain, forms
from warmup.choose import choose, text
from warmup.report import ChoiceReport
from warmup.target import Target

FLASH = described("DeepSeek-V4-Flash")
WEIGHTS = 44 * 256 * 3 * 4096 * 2048  # of the experts, those of multi-token prediction included
BYTES = {"fp8": 1 + 4 / 128**2, "mxfp4": 4.25 / 8 + 4 / 128**2}  # of each, with scales or bases
SETTING = "FP8MOE_FP4_EXPERTS"


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def flash(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The figures do not depend on the variable's own value."""
    with environment(SETTING, request.param):
        return read_model(describe(tmp_path_factory.mktemp(request.param), FLASH))


@pytest.mark.parametrize("sglang", [False, True])
@pytest.mark.parametrize("way", [(4, 1, 1), (8, 1, 1), (8, 1, 8)])
def test_each_form_is_counted(flash: Model, way: tuple[int, ...], sglang: bool) -> None:
    parallel = Parallel(*way, sglang=sglang)
    found = explain.explain(flash, parallel, 8192, ()).forms
    assert [form.setting for form in found] == ["fp8", "mxfp4"]
    others = [form.weight_bytes - WEIGHTS / parallel.ranks * BYTES[form.setting] for form in found]
    assert others == pytest.approx([others[0]] * 2, rel=1e-6)
    assert 0 < others[0] < 6e9


@pytest.mark.parametrize(
    ("parallel", "tokens", "wanted"),
    [
        (Parallel(8), 2304, "the longest steps, of 2,304 tokens (54 rows), have fewer: take mxfp4, the default."),
        (
            Parallel(8),
            8192,
            "In steps of up to 2,560 tokens on an H200 (60 rows per expert) or 4,096 tokens on an H100",
        ),
        (Parallel(1, 8, 8), 8192, "In steps of up to 469 tokens on an H200 (88 rows per expert)"),
        (
            Parallel(8),
            8192,
            "longer ones, up to those of 8,192 tokens (192 rows), fp8 is. Where long prefills dominate",
        ),
    ],
)
def test_the_longest_step_decides(flash: Model, parallel: Parallel, tokens: int, wanted: str) -> None:
    found = explain.explain(flash, parallel, tokens, ())
    (advice,) = forms.advice(flash, parallel, tokens, found.forms)
    assert wanted in advice
    printed = " ".join(explain.text(flash, parallel, found, tokens).split())
    assert advice in printed


@pytest.mark.parametrize(("value", "what"), [("fp8", "keep"), ("mxfp4", "set")])
def test_a_form_that_is_chosen_already_is_kept(flash: Model, value: str, what: str) -> None:
    with environment(SETTING, value):
        (advice,) = forms.advice(flash, Parallel(8), 8192, explain.explain(flash, Parallel(8), 8192, ()).forms)
    assert advice.endswith(f"and memory allows, {what} FP8MOE_FP4_EXPERTS=fp8.")


def judged(model: Model, gpu: str, gpus: int, tokens: int = 8192, sglang: bool = False) -> ChoiceReport:
    return choose(model, Target(gpu, gpus, 0.92, False, 131072, tokens, sglang=sglang), "org/V4")


def test_where_both_fit_prefills_decide(flash: Model) -> None:
    found = judged(flash, "h200", 8)
    fp8, mxfp4 = found.forms
    assert fp8.fits
    assert mxfp4.fits
    assert fp8.options == mxfp4.options == found.latency
    assert (fp8.weight_bytes, mxfp4.cache_tokens) > (mxfp4.weight_bytes, fp8.cache_tokens)
    (note,) = [note for note in found.notes if note.startswith("Forms of the experts")]
    assert f"fp8 36.9 GB (a KV cache of {fp8.cache_tokens:,} tokens)" in note
    assert note.endswith("Where long prefills dominate, set FP8MOE_FP4_EXPERTS=fp8.")
    assert note in " ".join(text(found).split())
    assert "take mxfp4, the default." in " ".join(judged(flash, "h200", 8, 2304).notes)
    split = f"{found.latency}".replace("--tp", "--tp-size")
    assert judged(flash, "h200", 8, sglang=True).forms[0].options == split


@pytest.mark.parametrize("gpu", ["h200", "h20"])
def test_the_form_that_fits_is_named(flash: Model, gpu: str) -> None:
    found = judged(flash, gpu, 2)
    assert [form.fits for form in found.forms] == [False, True]
    assert "fp8 143.6 GB (does not fit)" in " ".join(found.notes)
    assert "Only mxfp4 fits." in " ".join(found.notes)
    fits = found.forms[1].options
    packed = flash.weights.name == "packed MXFP4"
    advice = f"Or unset FP8MOE_FP4_EXPERTS: with experts in MXFP4 {fits} fits."
    assert (advice in " ".join(text(found).split())) != packed


def test_commands_set_the_form(flash: Model) -> None:
    found = judged(flash, "h200", 8)
    variable = "FP8MOE_FP4_EXPERTS=fp8 " * (flash.weights is FP8_BLOCK)
    for split in (split for split in found.splits if not split.refusal):
        assert split.vllm.startswith(f"{variable}vllm serve org/V4")
        assert split.sglang.startswith(f"{variable}python -m sglang.launch_server") or not split.sglang


@pytest.mark.parametrize("expert_dtype", ["fp8", None])
def test_other_experts_have_one_form(tmp_path: Path, expert_dtype: str | None) -> None:
    """Or it is not known which they have."""
    model = read_model(describe(tmp_path, FLASH, expert_dtype=expert_dtype))
    assert explain.explain(model, Parallel(8), 8192, ()).forms == []
    assert judged(model, "h200", 8).forms == []
    assert "Forms of the experts" not in text(judged(model, "h200", 8))
