"""The plugin's name, and every FP8MOE_* environment variable, typed, with its default and one sentence."""

import functools
import logging
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fp8moe_plugin.checkpoint.untrusted import shown
from fp8moe_plugin.errors import UnsupportedError

NAME = "fp8moe"  # of the quantization method: --quantization fp8moe
logger = logging.getLogger(NAME)
PREFIX = "FP8MOE_"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
LISTED_NAMES = 10  # of unknown variables
PLAIN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True)

    backend: Literal["auto", "sm90", "reference"] = Field(
        "auto",
        description="`sm90`: our kernels; `reference`: plain torch; "
        "`auto`: our kernels on a Hopper GPU, else torch; under vLLM other GPUs are refused.",
    )
    bundle: Path | None = Field(
        None, description="Archive of compiled kernels from `python -m warmup bundle`, looked at first; only read."
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder of the compiled kernels; default: `fp8moe` in `VLLM_CACHE_ROOT`, else in the user's cache "
        "folder (`XDG_CACHE_HOME`, `~/.cache`).",
    )
    debug: bool = Field(
        False,
        description="Check device-side values (expert ids, counts) before each call, and after a layer that each row "
        "of its result is written, from nothing but what was written; costs syncs.",
    )
    jit: Literal["allow", "warn", "forbid"] = Field(
        "allow",
        description="A kernel that is in neither the bundle nor the cache: `allow` compiles it, `warn` too and says "
        "so, `forbid` refuses to start.",
    )
    nvtx: bool = Field(False, description="NVTX ranges around each layer, named by its op and sizes.")


@functools.cache
def settings() -> Settings:
    """The settings of this process, read from the environment once.

    Raises:
        UnsupportedError: a variable has a value that it cannot have.
    """
    known = {variable(field): field for field in Settings.model_fields}
    unknown = sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)
    if unknown:
        logger.warning("fp8moe: ignores %s; its variables are %s", _listed(unknown), ", ".join(known))
    given = {known[name.upper()]: value for name, value in os.environ.items() if value and name.upper() in known}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        allowed = "Input should be 0 or 1" if Settings.model_fields[field].annotation is bool else first["msg"]
        raise UnsupportedError(
            f"{variable(field)} is {shown(first['input'])}. {allowed}. Change or unset it."
        ) from error


@functools.cache
def batch_invariant() -> bool:
    """Whether a token's result may not depend on the other tokens, nor on how many they are.

    vLLM's own variable, read from the environment as vLLM reads it, but once; what it changes is in `plan.step`.

    Raises:
        UnsupportedError: the variable is no number.
    """
    given = os.environ.get(BATCH_INVARIANT, "0")
    try:
        return bool(int(given))
    except ValueError:
        raise UnsupportedError(
            f"{BATCH_INVARIANT} is {shown(given)}. It should be 0 or 1. Change or unset it."
        ) from None


def _listed(names: list[str]) -> str:
    """Names of variables for a message: quoted and cut where they are not plain, and only the first of many."""
    listed = [name if PLAIN_NAME.fullmatch(name) else shown(name) for name in names[:LISTED_NAMES]]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def variable(field: str) -> str:
    return f"{PREFIX}{field.upper()}"
