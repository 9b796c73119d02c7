"""The warm-up and the engine agree on a config.json: on whether it is quantized, and on what is refused.

The engine's side is vLLM's own code, up to the config from which it creates a quantization method.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8moe_plugin.checkpoint.model import read_model
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.formats.spec import parse_quantization
from tests.helpers import environment

pytest.importorskip("vllm")
PUBLISHED = json.loads((Path(__file__).parent / "configs" / "Qwen3-30B-A3B-FP8.json").read_text())
QWEN = {key: value for key, value in PUBLISHED.items() if key != "quantization_config"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
OTHER = {"quant_method": "compressed-tensors"}
TEXT = {key: value for key, value in QWEN.items() if key not in ("architectures", "model_type")}
SEES = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
BY_MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def sees(text: dict[str, Any], **top: Any) -> dict[str, Any]:
    """Returns a model whose experts are in its `text_config`."""
    return SEES | {"text_config": TEXT | {"model_type": "qwen3_vl_moe_text"} | text} | top


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "unquantized": (QWEN, None),
    "FP8": (QWEN | {"quantization_config": FP8}, None),
    "FP8 in capitals": (QWEN | {"quantization_config": FP8 | {"quant_method": "FP8"}}, None),
    "without a method": (QWEN | {"quantization_config": {"weight_block_size": [128, 128]}}, None),
    "empty": (QWEN | {"quantization_config": {}}, None),
    "null": (QWEN | {"quantization_config": None, "compression_config": None}, None),
    "compressed, FP8": (QWEN | {"compression_config": FP8}, None),
    "compressed, FP8, beside null": (QWEN | {"quantization_config": None, "compression_config": FP8}, None),
    "compressed, other": (QWEN | {"compression_config": OTHER}, None),
    "compressed, empty": (QWEN | {"compression_config": {}}, None),
    "both": (QWEN | {"quantization_config": FP8, "compression_config": OTHER}, None),
    "both, the other way": (QWEN | {"quantization_config": OTHER, "compression_config": FP8}, None),
    "a file of ModelOpt": (QWEN, BY_MODELOPT),
    "FP8 in that file": (QWEN, FP8),
    "another file beside FP8": (QWEN | {"quantization_config": FP8}, BY_MODELOPT),
    "sees": (sees({}), None),
    "sees, FP8": (sees({}, quantization_config=FP8), None),
    "sees, text FP8": (sees({"quantization_config": FP8}), None),
    "sees, text other": (sees({"quantization_config": OTHER}), None),
    "sees, text FP8, else other": (sees({"quantization_config": FP8}, quantization_config=OTHER), None),
    "sees, compressed": (sees({}, compression_config=FP8), None),
    "sees, text compressed": (sees({"compression_config": FP8}), None),
    "sees, text FP8, compressed other": (sees({"quantization_config": FP8}, compression_config=OTHER), None),
    "unused NaN": (QWEN | {"initializer_range": float("nan")}, None),
    "unused infinities": (QWEN | {"limits": [float("inf"), {"of": float("-inf")}]}, None),
}


def write(folder: Path, config: dict[str, Any], modelopt: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
    return folder


def by_engine(folder: Path) -> bool | str:
    """Returns whether the engine loads FP8 weights, or "refused"."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_utils import get_quant_config
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    import fp8moe_plugin

    fp8moe_plugin.register()
    try:
        config = get_config(str(folder), trust_remote_code=False)
        ModelArchConfigConvertorBase(config, config.get_text_config()).get_quantization_config()  # writes to config
        model = SimpleNamespace(
            hf_config=config,
            quantization="fp8moe",
            quantization_config=None,
            hf_overrides={},
            model=str(folder),
            revision=None,
        )
        with environment("FP8MOE_BACKEND", "reference"):
            return not get_quant_config(model, LoadConfig()).online
    except UnsupportedError:
        return "refused"


def by_warmup(folder: Path) -> bool | str:
    try:
        return read_model(folder).quantized
    except (CheckpointError, UnsupportedError):
        return "refused"


@pytest.mark.parametrize("case", CASES)
def test_warmup_reads_a_config_as_the_engine_does(tmp_path: Path, case: str) -> None:
    folder = write(tmp_path, *CASES[case])
    assert by_warmup(folder) == by_engine(folder)


def test_the_cases_are_of_all_outcomes(tmp_path: Path) -> None:
    found = set()
    for number, case in enumerate(CASES):
        (folder := tmp_path / str(number)).mkdir()
        found.add(by_warmup(write(folder, *CASES[case])))
    assert found == {True, False, "refused"}


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_a_used_field_that_is_no_number_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, sees({"hidden_size": float(name)}), None)
    with pytest.raises(CheckpointError, match=f"hidden_size is {name}, which is not a JSON number"):
        read_model(tmp_path)


def test_a_damaged_file_of_modelopt_is_named(tmp_path: Path) -> None:
    write(tmp_path, QWEN, None)
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json' contains \[\] instead of a JSON object"):
        read_model(tmp_path)


def test_a_method_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="quant_method is 8"):
        parse_quantization(FP8 | {"quant_method": 8})
