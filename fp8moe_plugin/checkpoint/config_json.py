"""Reads a checkpoint's config.json, and finds the language model and its quantization in it."""

import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from fp8moe_plugin.checkpoint.config_fields import EXPERT_COUNTS, FIELDS
from fp8moe_plugin.checkpoint.untrusted import ADVICE, Limits, opened, read_json
from fp8moe_plugin.errors import CheckpointError, UnsupportedError
from fp8moe_plugin.quoting import shown
from fp8moe_plugin.settings import NAME

# Published files name every unquantized layer, in 50 kB, or describe each projection of each expert by an object, as
# ModelOpt does: 22,000 of them in MiniMax-M3's.
LIMITS = Limits(size=16 << 20, containers=180_000, values=400_000)
MODELOPT = "hf_quant_config.json"  # older versions of NVIDIA's ModelOpt describe the quantization there


def load_config(folder: Path) -> dict[str, Any]:
    """Returns the JSON object in a checkpoint's config.json; its fields are not checked.

    Raises:
        CheckpointError: the file is damaged.
        OSError: it is missing or cannot be opened.
    """
    return _load(folder / "config.json")


def _load(path: Path) -> dict[str, Any]:
    """Read JSON that may contain NaN and infinities: not standard, but written by Python and read by vLLM."""
    with opened(path) as file:
        found, _ = read_json(file, LIMITS.size + 1, LIMITS, shown(str(path)), constants=True)
    return found


def quantization_config(folder: Path, config: dict[str, Any]) -> Any:
    """Returns a checkpoint's unchecked quantization config. The search order is that of vLLM's `get_quant_config`.

    Args:
        config: the result of `load_config`.
    Returns:
        None for an unquantized checkpoint.
    Raises:
        CheckpointError: ModelOpt's file is damaged.
        OSError: ModelOpt's file cannot be opened.
    """
    modelopt, text = folder / MODELOPT, config.get("text_config")
    found = config.get("quantization_config")
    if found is None and os.path.lexists(modelopt):
        found = _load(modelopt)
    if found is None and isinstance(text, dict):
        found = text.get("quantization_config")
    return config.get("compression_config") if found is None else found


class Description(NamedTuple):
    """The part of a checkpoint's config.json about its language model."""

    fields: dict[str, Any]  # unchecked; `quantization_config` is that of the checkpoint
    nested: bool  # whether the language model is a part of another model
    remote_code: bool  # whether the checkpoint comes with code of its own
    file: str  # its name, for messages


def read_description(folder: Path) -> Description:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: the file is damaged.
        UnsupportedError: the model has no experts.
        OSError: the file is missing or cannot be opened.
    """
    config, what = load_config(folder), shown(str(folder / "config.json"))
    _check_constants(config, what)
    found = language_model(config)
    if found is None:
        raise UnsupportedError(
            f"{what} does not describe a mixture-of-experts model: it has no {', '.join(EXPERT_COUNTS[:-1])} or "
            f"{EXPERT_COUNTS[-1]}. Serve it without --quantization {NAME}."
        )
    nested = not any(config.get(key) for key in EXPERT_COUNTS)
    fields = found | {"quantization_config": quantization_config(folder, config)}
    return Description(fields, nested, bool(config.get("auto_map")), what)


def language_model(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the object of a config.json that describes a language model with experts (root or nested), or None."""
    thinker = config.get("thinker_config")
    below = [config.get("text_config"), thinker.get("text_config") if isinstance(thinker, dict) else None]
    parts = [part for part in (config, *below) if isinstance(part, dict)]
    found = next((part for part in parts if any(part.get(key) for key in EXPERT_COUNTS)), None)
    architectures = config.get("architectures")
    return found if found is None or architectures is None else found | {"architectures": architectures}


def _check_constants(config: dict[str, Any], what: str) -> None:
    """Raise `CheckpointError` for NaN or an infinity in a field that shapes depend on."""
    for part in (config, config.get("text_config")):
        for key, value in part.items() if isinstance(part, dict) else ():
            if key in FIELDS and isinstance(value, float) and not math.isfinite(value):
                name = json.dumps(value)
                raise CheckpointError(f"{what}: {key} is {name}, which is not a JSON number. {ADVICE}")
