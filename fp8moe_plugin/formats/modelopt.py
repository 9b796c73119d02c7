"""Checkpoints of NVIDIA's ModelOpt: those in FP8 have one scale for each weight, and a static one for its inputs."""

import fnmatch
import re
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.patterns import PATTERN, check_patterns
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

QUANT_ALGOS = ("moe_quant_algo", "quant_algo")  # where ModelOpt names its formats
IGNORED = ("exclude_modules", "ignore")  # in hf_quant_config.json, and in config.json


def parse_modelopt(config: dict[str, Any]) -> tuple[str, ...] | None:
    """Returns the layers that a checkpoint of ModelOpt in FP8 keeps unquantized, or None if ModelOpt did not make it.

    Raises:
        UnsupportedError: it has another format, or experts in another one.
    """
    inner, method = config.get("quantization"), config.get("quant_method")
    parts = [config, *([inner] if isinstance(inner, dict) else [])]
    found = next((part[key] for key in QUANT_ALGOS for part in parts if part.get(key)), None)
    named = (isinstance(method, str) and method.lower().startswith("modelopt")) or bool(found and method is None)
    algo = str(found).upper()
    if (named and algo != "FP8") or (found and not algo.startswith("FP8")):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint was quantized by ModelOpt to {shown(found)} (quant_method "
            f"{shown(method)}), but of its formats only 'FP8' is supported. Remove --quantization to let the engine "
            "choose the method."
        )
    return _ignored(parts) if named else None


def _ignored(parts: list[dict[str, Any]]) -> tuple[str, ...]:
    key, names = next(((key, part[key]) for key in IGNORED for part in parts if part.get(key)), ("ignore", []))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's {key} is {shown(names)}, but must be a list of layer names. "
            "Correct its quantization_config."
        )
    layers = tuple(map(_name_or_pattern, names))
    check_patterns(layers, key)
    return layers


def _name_or_pattern(entry: str) -> str:
    """Returns a layer's full name unchanged. Others are shell patterns, or a part of the names of all their layers."""
    if re.search(r"[*?[]", entry):
        return PATTERN + fnmatch.translate(entry)
    return entry if ".layers." in entry else f"{PATTERN}.*{re.escape(entry)}"
