"""How a checkpoint is quantized: what its `quantization_config` says, and which layers it keeps unquantized."""

import re
from typing import Any

from fp8moe_plugin.checkpoint import compressed
from fp8moe_plugin.checkpoint.patterns import PATTERN, check_patterns, matches
from fp8moe_plugin.checkpoint.shapes import GROUP
from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

WEIGHT_BLOCK = [GROUP, GROUP]
E4M3 = ("e4m3", "float8_e4m3fn")
SCALE = "weight_scale_inv"
METHODS = ("fp8", "deepseek_v4_fp8")  # the second is what vLLM makes of the first for DeepSeek-V4
STORED = ("store_dtype", "routed_experts_quant_method")  # must be absent
BY_SUFFIX = ("bailing_hybrid",)  # model types whose class in vLLM compares what names end with
QUANT_ALGOS = ("moe_quant_algo", "quant_algo")  # where ModelOpt names its formats

# The layers that engines fuse, each with the projections that a checkpoint has instead.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
FUSED_LINEAR = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z")}  # of Qwen's linear attention, never quantized online
MODEL = r"(?:language_model\.model|model\.language_model|model)"
LAYER_NAME = re.compile(rf"{MODEL}\.layers\.(\d{{1,6}})\.(.+)", re.ASCII)
ABOVE = re.compile(rf"^(?:{MODEL}\.)?layers\.\d{{1,6}}(?:\.|$)", re.ASCII)  # what a name of a layer may begin with


ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"),
    *("q_b_proj", "kv_b_proj", "indexer.wq_b"),
)
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
LAYERS = (  # what their names end with, of those that may be FP8
    *(f"self_attn.{name}" for name in ATTENTION),
    *(f"{mlp}.{name}" for mlp in ("mlp", "mlp.shared_expert", "mlp.shared_experts") for name in MLP),
    *(f"linear_attn.{name}" for name in (*FUSED_LINEAR, *FUSED_LINEAR["in_proj_qkvz"], "out_proj")),
    "mlp.experts",
)


class Unquantized:
    """The layers that a checkpoint keeps unquantized, by the rules of vLLM's `is_layer_skipped`.

    A layer is unquantized if its full name is listed. A fused layer is also unquantized if all its projections are
    listed. A layer with "experts" in its name is also unquantized if a listed name starts with its own, so that one
    listed expert stands for all. Entries that begin with `re:` are regular expressions (`patterns.py`). With
    `suffixes`, an entry may also be what a full name ends with. With `nested`, the language model is a part of another,
    and patterns match vLLM's names of its layers.
    """

    def __init__(self, names: list[str] | None, suffixes: bool = False, nested: bool = False) -> None:
        self.above = "language_model.model.layers" if nested else "model.layers"
        self.suffixes = set(names or ()) if suffixes else set()
        self.names: dict[str, set[str]] = {}
        for match in filter(None, map(LAYER_NAME.fullmatch, names or ())):
            self.names.setdefault(match[1], set()).add(match[2])
        self.patterns = [name for name in names or () if name.startswith(PATTERN)]

    def has(self, layer: int, name: str) -> bool:
        listed = self.names.get(str(layer), set())
        module, _, last = name.rpartition(".")
        fused = (FUSED | FUSED_LINEAR).get(last, ())
        parts = [self._is_listed(layer, f"{module}.{part}") for part in fused]
        if self._is_listed(layer, name) or (parts and all(parts)):
            return True
        if any(parts):
            raise UnsupportedError(
                f"The checkpoint keeps only a part of layer {layer}'s {name} unquantized, but engines fuse its parts. "
                "Correct quantization_config in its config.json so that all of them are unquantized, or none."
            )
        if parts or self.suffixes:
            return False
        return "experts" in name and any(other.startswith(name) for other in listed)

    def _is_listed(self, layer: int, name: str) -> bool:
        if name in self.names.get(str(layer), set()):
            return True
        parts = f"model.layers.{layer}.{name}".split(".") if self.suffixes else []
        if any(".".join(parts[start:]) in self.suffixes for start in range(len(parts))):
            return True
        return bool(self.patterns) and matches(self.patterns, f"{self.above}.{layer}.{name}")


def incomplete_names(names: list[str] | None) -> tuple[str, ...]:
    """The entries of such a list that are a part of the name of a layer, or a module with layers below it.

    They are meant for these layers, but vLLM compares full names: the entries have no effect. SGLang also takes
    names of modules and ends of names. Names of other modules, such as norms or a vision tower, are not returned.
    """
    return tuple(name for name in names or () if not name.startswith(PATTERN) and _is_incomplete(name))


def incomplete_text(names: tuple[str, ...]) -> str:
    """A warning of entries that `incomplete_names` found."""
    return (
        f"in the checkpoint's list of unquantized layers, {shown(list(names))} are not full names. vLLM compares full "
        "names, so that no layer is kept unquantized by them; SGLang also takes parts of names. If loading fails for "
        "the dtype of such a layer, write full names (model.layers.0.self_attn.o_proj) or patterns (re:.*self_attn.*) "
        "into quantization_config of its config.json."
    )


def _is_incomplete(name: str) -> bool:
    full = LAYER_NAME.fullmatch(name)
    if full and (full[2] in LAYERS or full[2].startswith("mlp.experts")):  # one listed expert stands for all
        return False
    meant = name.removesuffix(".weight").replace("layers.*", "layers.0").strip("*.")
    short = ABOVE.sub("", meant, count=1)
    if short == meant:
        return any(f".{short}." in f".{layer}." for layer in LAYERS)
    return not short or any(f"{layer}.".startswith(f"{short}.") for layer in LAYERS)


def block_fp8(config: dict[str, Any]) -> dict[str, Any]:
    """A `quantization_config` in the form of `quant_method: fp8`, checked.

    Raises:
        UnsupportedError: it does not describe dynamic block FP8 with 128x128 blocks.
    """
    found = compressed.as_fp8(config) if compressed.is_compressed(config) else config
    check_quantization(found)
    return found


def scale_name(config: dict[str, Any]) -> str:
    """What the names of a checkpoint's scales end with, by its `quantization_config`."""
    return compressed.SCALE if compressed.is_compressed(config) else SCALE


def check_quantization(config: dict[str, Any]) -> None:
    """Raise `UnsupportedError` unless this `quantization_config` describes dynamic block FP8 with 128x128 blocks."""
    method, block = config.get("quant_method"), config.get("weight_block_size")
    _check_modelopt(config)
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
            f"scale per {GROUP}x{GROUP} block. Use --quantization fp8 for this checkpoint."
        )
    others = [config[key] for key in STORED if config.get(key) is not None]
    if others or str(config.get("fmt") or E4M3[0]).lower() not in E4M3:
        stored = shown(others[0] if others else config.get("fmt")).strip("'")
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint stores its weights as {stored}, but the kernels need e4m3. "
            "Remove --quantization to let the engine choose the method."
        )


def _check_modelopt(config: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for a checkpoint of NVIDIA's ModelOpt, and for one with experts in its FP4."""
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


def unquantized_layers(config: dict[str, Any]) -> list[str] | None:
    """The names of the layers that a `quantization_config` keeps unquantized, under either of the two keys in use."""
    return layer_names(config, "ignored_layers") or layer_names(config, "modules_to_not_convert")


def layer_names(config: dict[str, Any], key: str) -> list[str] | None:
    """The layers that a checkpoint keeps unquantized, as `key` of its `quantization_config` lists them."""
    names = config.get(key)
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        check_patterns(names or (), key)
        return names
    raise UnsupportedError(
        f"--quantization {NAME}: the checkpoint's {key} is {shown(names)}, but must be a list of layer names. "
        "Correct quantization_config in its config.json."
    )
