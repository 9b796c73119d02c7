"""FP8MOE_TAKE_FP8=1: SGLang serves a checkpoint with the plugin without --quantization fp8moe."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.quantization.fp8 import Fp8Config

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.layers.sglang.config import Fp8MoeConfig
from fp8moe_plugin.layers.sglang.entry import Entry
from tests.helpers import environment
from tests.layers.sglang import test_config

pytestmark = pytest.mark.seam
CHECKPOINT, options = test_config.CHECKPOINT, test_config.options


@pytest.mark.parametrize("user_quant", [None, "fp8"])
def test_a_checkpoint_is_taken_over_by_a_variable(user_quant):
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert Entry.override_quantization_method(CHECKPOINT, user_quant) == "fp8moe"
        assert Entry.override_quantization_method(CHECKPOINT, "awq") is None
        assert Entry.override_quantization_method({"quant_method": "awq"}, None) is None


def test_a_checkpoint_of_which_sglang_passes_on_no_layers_is_left_to_it():
    from_file = {"quant_method": "modelopt_fp8", "quant_algo": "FP8"}
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert Entry.override_quantization_method(from_file, None) is None
        assert Entry.override_quantization_method(from_file | {"ignore": []}, None) == "fp8moe"


def test_options_that_the_plugin_does_not_support_leave_the_checkpoint_to_the_engine(
    options: SimpleNamespace, plugin_log: pytest.LogCaptureFixture
) -> None:
    options.enable_lora = True
    with pytest.raises(UnsupportedError, match="LoRA"):
        Entry.from_config(CHECKPOINT)
    with environment("FP8MOE_TAKE_FP8", "1"):
        assert type(Entry.from_config(CHECKPOINT)) is Fp8Config
        options.enable_lora = None
        assert type(Entry.from_config(CHECKPOINT)) is Fp8MoeConfig
    (line,) = plugin_log.messages
    assert line.startswith("fp8moe: FP8MOE_TAKE_FP8: the checkpoint stays with SGLang's own method. LoRA is not supp")
