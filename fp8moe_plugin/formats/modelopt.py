"""Checkpoints of NVIDIA's ModelOpt: those in FP8 have one scale for each weight, and a static one for its inputs."""

import fnmatch
import re
from typing import Any

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.formats.patterns import PATTERN, check_patterns
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

QUANT_ALGOS = ("moe_quant_algo", "quant_algo")  # where ModelOpt names its formats
PROJECTION = re.compile(r"(_proj|\.in_proj_\w+|gate|\.w[123])$")  # the end of a layer's name, unlike a module's
IGNORED = ("exclude_modules", "ignore")  # in hf_quant_config.json, and in config.json


def parse_modelopt(config: dict[str, Any]) -> tuple[str, ...] | None:
    """Returns the layers that a checkpoint of ModelOpt in FP8 keeps unquantized, or None if ModelOpt did not make it.

    Raises:
        UnsupportedError: it has another format, or experts in another one.
    """
    parts, method = _parts(config), config.get("quant_method")
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


def cache_bits(config: dict[str, Any]) -> int | None:
    """Returns the bits of an element of the KV cache that a checkpoint of ModelOpt asks for, if it does."""
    named = any(part.get("kv_cache_quant_algo") == "FP8" for part in _parts(config))
    scheme = config.get("kv_cache_scheme")
    return 8 if named or (isinstance(scheme, dict) and scheme.get("num_bits") == 8) else None


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the objects that may have ModelOpt's keys: in hf_quant_config.json they are in an inner one."""
    inner = config.get("quantization")
    return [config, *([inner] if isinstance(inner, dict) else [])]


def _ignored(parts: list[dict[str, Any]]) -> tuple[str, ...]:
    key, names = next(((key, part[key]) for key in IGNORED for part in parts if part.get(key)), ("ignore", []))
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UnsupportedError(
            f"--quantization {NAME}: the checkpoint's {key} is {shown(names)}, but must be a list of layer names. "
            "Correct its quantization_config."
        )
    layers = tuple(dict.fromkeys(form for name in names for form in _forms(name)))
    check_patterns(layers, key)
    return layers


def _forms(entry: str) -> tuple[str, ...]:
    """Returns an entry as a layer's full name, or as patterns: it may also be a shell pattern, or a module's name.

    A shell pattern of all that is in a module stands for the module, too: an engine's experts are one layer. A name
    without layers is a part of the names that it stands for, as for vLLM.
    """
    if re.search(r"[*?[]", entry):
        return tuple(PATTERN + fnmatch.translate(form) for form in dict.fromkeys((entry, entry.removesuffix(".*"))))
    if ".layers." not in entry:
        return (f"{PATTERN}.*{re.escape(entry)}",)
    return (entry if PROJECTION.search(entry) else rf"{PATTERN}{re.escape(entry)}(?:\.|$)",)
