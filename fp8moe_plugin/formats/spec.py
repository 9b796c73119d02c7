"""The quantization of a checkpoint: its `quantization_config`, parsed once into a `QuantSpec`."""

from dataclasses import dataclass, replace
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.compressed import METHOD as COMPRESSED
from fp8moe_plugin.formats.compressed import is_compressed, parse_compressed
from fp8moe_plugin.formats.fp8_block import FP8_BLOCK, FP8_BLOCK_32
from fp8moe_plugin.formats.fp8_channel import FP8_CHANNEL
from fp8moe_plugin.formats.modelopt import cache_bits, parse_modelopt
from fp8moe_plugin.formats.mxfp4 import MXFP4, NAMES, PACKED_MXFP4
from fp8moe_plugin.formats.patterns import check_patterns
from fp8moe_plugin.formats.weight_format import WeightFormat
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME, settings

FORMATS = (FP8_BLOCK, FP8_CHANNEL, PACKED_MXFP4)  # those that kernels compute
FORMS_OF_MXFP4 = {"fp8": FP8_BLOCK, "mxfp4": PACKED_MXFP4}  # by the values of FP8MOE_FP4_EXPERTS
WEIGHT = "weight"  # suffix of weights' names
SCALE_NAMES = tuple(dict.fromkeys(name for known in FORMATS for name in known.scale_names))
SCALE, COMPRESSED_SCALE = FP8_BLOCK.scale_names
METHODS = ("fp8", "deepseek_v4_fp8")  # vLLM replaces the first by the second for DeepSeek-V4
GPT_OSS_METHODS = ("mxfp4", "gpt_oss_mxfp4")  # likewise for gpt-oss
E4M3 = ("e4m3", "float8_e4m3fn")
STORED = ("store_dtype", "routed_experts_quant_method")  # must be absent


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
    cache_bits: int | None = None  # of an element of the KV cache, if the checkpoint asks for quantized ones
    # All experts of a layer are one tensor, in which gate and up rows alternate; all other layers are unquantized.
    gpt_oss: bool = False

    @property
    def stores_blocks(self) -> bool:
        """Whether the checkpoint has scales of blocks of experts, as `weights` has."""
        return not self.online and self.recoded_from is None and self.weights.weight_block is not None


ONLINE = QuantSpec(FP8_BLOCK, online=True)


def parse_quantization(config: dict[str, Any]) -> QuantSpec:
    """Parse a `quantization_config`.

    Raises:
        UnsupportedError: it describes neither FP8 with a scale for each 128x128 block, each row or each weight, nor
            MXFP4 as gpt-oss has it, or its list of unquantized layers is not valid.
    """
    if is_compressed(config):
        scheme = parse_compressed(config)
        spec = QuantSpec(FP8_BLOCK, scale=COMPRESSED_SCALE, unquantized=scheme.ignored)
        spec = spec if scheme.weights is FP8_BLOCK else _by_row(scheme.input_scales, scheme.ignored)
        return replace(spec, cache_bits=scheme.cache_bits)
    if (ignored := parse_modelopt(config)) is not None:
        return replace(_by_row(True, ignored), cache_bits=cache_bits(config))
    method = config.get("quant_method")
    if isinstance(method, str) and method.lower() in GPT_OSS_METHODS:
        return replace(recoded(QuantSpec(FP8_BLOCK), MXFP4), gpt_oss=True)
    _check_scheme(config)
    names = _names(config, "ignored_layers") or _names(config, "modules_to_not_convert")
    if config.get("weight_block_size") is None:
        return _by_row(config.get("activation_scheme") == "static", names)
    weights = _in_blocks(config)
    assert weights  # see `_check_scheme`
    return QuantSpec(weights, ue8m0=config.get("scale_fmt") == "ue8m0", unquantized=names, dense=weights)


def recoded(spec: QuantSpec, stored: WeightFormat) -> QuantSpec:
    """Returns the quantization of a checkpoint whose experts are stored in another format than its dense layers.

    Raises:
        UnsupportedError: they cannot be re-encoded to that of `spec`.
    """
    if spec.weights not in (FP8_BLOCK, FP8_BLOCK_32):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's experts are {stored.name}, but its other layers are not "
            f"{FP8_BLOCK.name}. Remove --quantization to let the engine choose the method."
        )
    return replace(spec, weights=FORMS_OF_MXFP4[settings().fp4_experts], recoded_from=stored)


def _in_blocks(config: dict[str, Any]) -> WeightFormat | None:
    """Returns the format of dense layers in FP8 by block, or None if it is not supported.

    Blocks of 32x32 are supported beside experts in MXFP4 (DeepSeek-V4.1): only the dense layers are then the engine's.
    """
    block, packed = config.get("weight_block_size"), config.get("expert_dtype") in NAMES
    known = (FP8_BLOCK, FP8_BLOCK_32) if packed else (FP8_BLOCK,)
    return next((one for one in known if isinstance(block, list | tuple) and list(block) == one.weight_block), None)


def _by_row(input_scales: bool, unquantized: tuple[str, ...]) -> QuantSpec:
    """Returns the quantization of a checkpoint with a scale for each row, or for each weight, which its rows share."""
    (scale,) = FP8_CHANNEL.scale_names
    return QuantSpec(FP8_CHANNEL, scale=scale, unquantized=unquantized, dense=FP8_CHANNEL, input_scales=input_scales)


def _check_scheme(config: dict[str, Any]) -> None:
    method, block = config.get("quant_method"), config.get("weight_block_size")
    if not isinstance(method, str) or method.lower() not in METHODS:  # vLLM ignores the case, too
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's quant_method is {shown(method)}, but only 'fp8' is supported, "
            f"and {COMPRESSED!r} and 'modelopt' in FP8. Remove --quantization to let the engine choose the method."
        )
    if block is not None and _in_blocks(config) is None:
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's weight_block_size is {shown(block)}, but the kernels need one "
            f"scale per {FP8_BLOCK.scales.part}, row or weight. Remove --quantization to let the engine choose the "
            "method."
        )
    scheme = config.get("activation_scheme")
    if scheme not in (["dynamic"] if block else ["dynamic", "static"]):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's activation_scheme is {shown(scheme)}, but must be 'dynamic', or "
            "'static' in one without weight_block_size. Use --quantization fp8 for this checkpoint."
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
