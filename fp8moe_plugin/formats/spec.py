"""The quantization of a checkpoint: its `quantization_config`, parsed once into a `QuantSpec`."""

from dataclasses import dataclass
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats import compressed
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.patterns import check_patterns
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

FORMATS = (FP8_BLOCK, FP8_CHANNEL)  # those that kernels compute
WEIGHT = "weight"  # suffix of weights' names
SCALE_NAMES = tuple(dict.fromkeys(name for known in FORMATS for name in known.scale_names))
SCALE, COMPRESSED_SCALE = FP8_BLOCK.scale_names
METHODS = ("fp8", "deepseek_v4_fp8")  # vLLM replaces the first by the second for DeepSeek-V4
WEIGHT_BLOCK = list(FP8_BLOCK.scales.block)
E4M3 = ("e4m3", "float8_e4m3fn")
STORED = ("store_dtype", "routed_experts_quant_method")  # must be absent
QUANT_ALGOS = ("moe_quant_algo", "quant_algo")  # where ModelOpt names its formats


@dataclass(frozen=True)
class QuantSpec:
    """The quantization of a model's weights, in its checkpoint or, if `online`, while they are loaded."""

    weights: WeightFormat  # of experts
    ue8m0: bool = False  # whether activation scales are powers of two
    scale: str = SCALE  # suffix of scales' names
    unquantized: tuple[str, ...] = ()  # the checkpoint's list of unquantized layers: names and patterns
    online: bool = False
    recoded_from: WeightFormat | None = None  # of experts in the checkpoint, if they are re-encoded when loaded
    dense: WeightFormat = FP8_BLOCK  # of dense layers
    input_scales: bool = False  # whether the checkpoint has scales of activations, which are not used


ONLINE = QuantSpec(FP8_BLOCK, online=True)


def parse_quantization(config: dict[str, Any]) -> QuantSpec:
    """Parse a `quantization_config`.

    Raises:
        UnsupportedError: it does not describe dynamic block FP8 with 128x128 blocks, or its list of unquantized layers
            is not valid.
    """
    if compressed.is_compressed(config):
        return QuantSpec(FP8_BLOCK, scale=COMPRESSED_SCALE, unquantized=compressed.ignored_layers(config))
    _refuse_modelopt(config)
    _check_scheme(config)
    names = _names(config, "ignored_layers") or _names(config, "modules_to_not_convert")
    return QuantSpec(FP8_BLOCK, ue8m0=config.get("scale_fmt") == "ue8m0", unquantized=names)


def _refuse_modelopt(config: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for checkpoints of NVIDIA's ModelOpt, and for those with experts in ModelOpt's FP4."""
    inner, method = config.get("quantization"), config.get("quant_method")
    parts = [config, *([inner] if isinstance(inner, dict) else [])]
    found = next((part[key] for key in QUANT_ALGOS for part in parts if part.get(key)), None)
    named = isinstance(method, str) and method.lower().startswith("modelopt")
    other = found and not str(found).upper().startswith("FP8")
    if named or other or (found and method is None):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint was quantized by ModelOpt to {shown(found)} (quant_method "
            f"{shown(method)}), but only block FP8 is supported. Remove --quantization to let the engine choose the "
            "method."
        )


def _check_scheme(config: dict[str, Any]) -> None:
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if not isinstance(method, str) or method.lower() not in METHODS:  # vLLM ignores the case, too
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's quant_method is {shown(method)}, but only 'fp8' is supported, "
            f"and {compressed.METHOD!r} in block FP8. Remove --quantization to let the engine choose the method."
        )
    scheme = config.get("activation_scheme")
    if scheme != "dynamic":
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's activation_scheme is {shown(scheme)}, but the kernels "
            "need 'dynamic': activation scales are computed at run time. Use --quantization fp8 for this checkpoint."
        )
    if not isinstance(block, list | tuple) or list(block) != WEIGHT_BLOCK:
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's weight_block_size is {shown(block)}, but the kernels need one "
            f"scale per {'x'.join(map(str, WEIGHT_BLOCK))} block. Remove --quantization to let the engine choose the "
            "method."
        )
    others = [config[key] for key in STORED if config.get(key) is not None]
    if others or str(config.get("fmt") or E4M3[0]).lower() not in E4M3:
        stored = shown(others[0] if others else config.get("fmt")).strip("'")
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint stores its weights as {stored}, but the kernels need e4m3. "
            "Remove --quantization to let the engine choose the method."
        )


def _names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    names = config.get(key)
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        check_patterns(names or (), key)
        return tuple(names or ())
    raise UnsupportedError(
        f"--quantization {NAME}: the checkpoint's {key} is {shown(names)}, but must be a list of layer names. "
        "Correct quantization_config in its config.json."
    )
