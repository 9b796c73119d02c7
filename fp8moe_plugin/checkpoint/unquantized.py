"""The layers that a checkpoint keeps unquantized, from its list of names and the rules of the engines."""

import re
from collections.abc import Sequence

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.patterns import PATTERN, matches
from fp8moe_plugin.quoting import shown

BY_SUFFIX = ("bailing_hybrid",)  # model types for which vLLM compares the ends of names

# The layers that engines fuse, each with the projections that a checkpoint has instead.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
}
DELTA_NET = "linear_attn"  # Qwen's linear attention
FUSED_LINEAR = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z")}  # its fused layer, never quantized online
# Layers of DeepSeek-V4 that vLLM never quantizes.
NEVER = ("compressor.fused_wkv_wgate", "indexer.weights_proj")
MODEL = r"(?:language_model\.model|model\.language_model|model)"
# DeepSeek-V4's names have no `model.`; vLLM adds it.
LAYER_NAME = re.compile(rf"(?:{MODEL}\.layers|layers(?=\.\d+\.(?:attn|ffn)\.))\.(\d{{1,6}})\.(.+)", re.ASCII)
ABOVE = re.compile(rf"^(?:{MODEL}\.)?layers\.\d{{1,6}}(?:\.|$)", re.ASCII)  # the beginning of a layer's name

ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "fused_qkv_a_proj"),
    *("q_b_proj", "kv_b_proj", "indexer.wq_b"),
)
DEEPSEEK_V4 = ("wq_a", "wkv", "fused_wqa_wkv", "wq_b", "wo_a", "wo_b", "indexer.wq_b")
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
MLP_NAMES = ("mlp", "mlp.shared_expert", "mlp.shared_experts", "ffn.shared_experts")
EXPERTS = ("mlp.experts", "ffn.experts")
LAYERS = (  # the ends of the names of layers that may be FP8
    *(f"self_attn.{name}" for name in ATTENTION),
    *(f"attn.{name}" for name in DEEPSEEK_V4),
    *(f"{mlp}.{name}" for mlp in MLP_NAMES for name in MLP),
    *(f"{DELTA_NET}.{name}" for name in (*FUSED_LINEAR, *FUSED_LINEAR["in_proj_qkvz"], "out_proj")),
    *EXPERTS,
)
_SPLIT = [layer.split(".") for layer in LAYERS]
BEGINNINGS = {".".join(words[:end]) for words in _SPLIT for end in range(1, len(words) + 1)}
PARTS = {".".join(words[begin:end]) for words in _SPLIT for end in range(len(words) + 1) for begin in range(end)}


class Unquantized:
    """The layers that a checkpoint keeps unquantized, by the rules of vLLM's `is_layer_skipped`.

    A layer is unquantized if its full name is listed. A fused layer is also unquantized if all its projections are
    listed or match a pattern: patterns are compared with these. A layer with "experts" in its name is also
    unquantized if a listed name starts with its own, so that one listed expert stands for all. Entries that begin
    with `re:` are regular expressions (`patterns.py`). With `suffixes`, an entry may also be the end of a full
    name. With `nested`, the language model is a part of another model, and patterns match vLLM's names of its
    layers. With `online`, the whole checkpoint is unquantized: a layer counts as unquantized if it is not quantized
    while it is loaded, see `layers.unquantized.is_quantized`. With `only_experts`, all other layers are unquantized.
    """

    def __init__(
        self,
        names: Sequence[str],
        suffixes: bool = False,
        nested: bool = False,
        online: bool = False,
        only_experts: bool = False,
    ) -> None:
        self.above = "language_model.model.layers" if nested else "model.layers"
        self.suffixes = set(names) if suffixes else set()
        self.names: dict[str, set[str]] = {}
        for match in filter(None, map(LAYER_NAME.fullmatch, names)):
            self.names.setdefault(match[1], set()).add(match[2])
        self.patterns = [name for name in names if name.startswith(PATTERN)]
        self.online, self.only_experts = online, only_experts

    def has(self, layer: int, name: str) -> bool:
        if name.endswith(NEVER):
            return True
        if self.only_experts:
            return name not in EXPERTS
        if self.online:
            return name.startswith(DELTA_NET)
        listed = self.names.get(str(layer), set())
        module, _, last = name.rpartition(".")
        fused = (FUSED | FUSED_LINEAR).get(last, ())
        parts = [self._is_listed(layer, f"{module}.{part}") for part in fused]
        if name in listed or (parts and all(parts)) or (not parts and self._is_listed(layer, name)):
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


def incomplete_names(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the entries of such a list that are a part of a layer's name, or the name of a module with layers.

    They have no effect in vLLM, which compares full names. SGLang also accepts names of modules and ends of names.
    Names of other modules, such as norms or a vision tower, are not returned.
    """
    return tuple(name for name in names if not name.startswith(PATTERN) and _is_incomplete(name))


def incomplete_text(names: tuple[str, ...]) -> str:
    """Returns a warning about entries that `incomplete_names` found."""
    return (
        f"in the checkpoint's list of unquantized layers, {shown(list(names))} are not full names. vLLM compares full "
        "names, so that no layer is kept unquantized by them; SGLang also takes parts of names. If loading fails for "
        "the dtype of such a layer, write full names (model.layers.0.self_attn.o_proj) or patterns (re:.*self_attn.*) "
        "into quantization_config of its config.json."
    )


def _is_incomplete(name: str) -> bool:
    full = LAYER_NAME.fullmatch(name)
    if full and (full[2] in LAYERS or full[2].startswith(EXPERTS)):  # one listed expert stands for all
        return False
    meant = name.removesuffix(".weight").replace("layers.*", "layers.0").strip("*.")
    short = ABOVE.sub("", meant, count=1)
    if short == meant:
        return short in PARTS
    return not short or short in BEGINNINGS
