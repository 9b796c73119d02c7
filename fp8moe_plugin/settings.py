"""The plugin's name, and its FP8MOE_* environment variables: the type, default and meaning of each."""

import contextlib
import functools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.quoting import shown

NAME = "fp8moe"  # the quantization method: --quantization fp8moe
logger = logging.getLogger(NAME)
PREFIX = "FP8MOE_"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
LISTED_NAMES = 10  # unknown variables named in the warning about them
UNEXPANDED = re.compile(r"\$[A-Za-z_{(]")  # as in $HOME, ${HOME}, $(HOME)
SWITCH = "Input should be 0 (or no, off, false) or 1 (or yes, on, true)"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True)

    backend: Literal["auto", "sm90", "triton", "reference"] = Field(
        "auto",
        description="`sm90`: our CUDA kernels for Hopper GPUs. `triton`: our Triton kernels. `reference`: plain "
        "PyTorch. `auto`: `sm90` on Hopper GPUs, `triton` on other GPUs with FP8, `reference` on a CPU.",
    )
    bundle: Path | None = Field(
        None,
        description="Archive of compiled kernels from `fp8moe-warmup bundle`. Searched before the cache; read-only.",
    )
    cache_dir: Path | None = Field(
        None,
        description="Folder for compiled kernels (the cache). Default: `fp8moe` in `VLLM_CACHE_ROOT` if that is set, "
        "otherwise in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`).",
    )
    debug: bool = Field(
        False,
        description="Check device-side values (expert ids, counts) before each call, and after each layer that every "
        "row of the result was written and no uninitialized memory was read. Synchronizes with the GPU, so it is slow.",
    )
    ep: Literal["engine", "push"] = Field(
        "engine",
        description="Under vLLM with expert and data parallelism on one host, how tokens reach the experts of other "
        "GPUs. `engine`: by vLLM's all-to-all. `push`: our kernels store tokens and results into the memory of the "
        "other GPUs, over NVLink. Experimental.",
    )
    fallback: Literal["allow", "forbid"] = Field(
        "allow",
        description="What to do with a dense layer or experts whose shape the kernels do not support. "
        "`allow`: run it on the engine's own kernels, and log which layers these are. `forbid`: refuse the model.",
    )
    fp4_experts: Literal["fp8", "mxfp4"] = Field(
        "mxfp4",
        description="What experts in MXFP4 (DeepSeek-V4, gpt-oss) become while they are loaded. `mxfp4`: they stay in "
        "MXFP4. `fp8`: block FP8, with the same weights, at twice the memory: on Hopper GPUs slower in decode, faster "
        "in long prefills; on others not measured.",
    )
    indexer: bool = Field(
        True,
        description="Under vLLM, compute the logits of a sparse-attention indexer (DeepSeek-V3.2) with our kernels. "
        "`0`: with DeepGEMM.",
    )
    jit: Literal["allow", "warn", "forbid"] = Field(
        "allow",
        description="What to do if a kernel is neither in the bundle, nor in the cache, nor in the installed wheel. "
        "`allow`: compile it. `warn`: compile it and log a warning. `forbid`: refuse to start.",
    )
    jit_debug: bool = Field(
        False,
        description="For each kernel that is compiled: print the compiler's command line and ptxas' report, and keep "
        "source, cubin and SASS beside the cached cubin.",
    )
    merge_shared_expert: bool = Field(
        True,
        description="Under vLLM, compute a shared expert that is as wide as the routed ones as one more of them. "
        "`0`: as dense layers on a second stream, as vLLM does.",
    )
    nvtx: bool = Field(False, description="Put an NVTX range around each layer, named after its op and sizes.")
    print_configs: bool = Field(
        False, description="Print a line for each new shape of an op: the chosen kernels, their tiles and grids."
    )
    router: bool = Field(
        True,
        description="Under vLLM, compute the logits of softmax routers (Qwen3-MoE) in short steps, and choose the "
        "experts, with our kernels. `0`: vLLM's gate and router do both.",
    )
    take_fp8: bool = Field(
        False,
        description="Serve each checkpoint that the plugin supports, as if `--quantization fp8moe` was given. What it "
        "does not support stays with the engine, as does gpt-oss, and one line of the log says why. `0`: only with "
        "`--quantization fp8moe`.",
    )
    tuning: Path | None = Field(
        None,
        description="File of `fp8moe-warmup tune` with thresholds for this GPU. Not used, with a warning, on another "
        "GPU or by another version of the plugin.",
    )

    @field_validator("bundle", "cache_dir", "tuning")
    @classmethod
    def _has_no_variables(cls, path: Path | None) -> Path | None:
        """systemd, Docker and YAML files pass `$HOME/x` on as it is, which would be a folder named `$HOME`."""
        if path and UNEXPANDED.search(str(path)):
            raise PydanticCustomError("variable", "Variables in a path are not expanded: write the path out, or use ~")
        return path


@functools.cache
def settings() -> Settings:
    """Returns the settings of this process, read from the environment once.

    Raises:
        UnsupportedError: a variable has an invalid value.
    """
    known = {variable(field): field for field in Settings.model_fields}
    unknown = unknown_variables()
    if unknown:
        logger.warning("fp8moe: unknown variables are ignored: %s. Known are %s", _listed(unknown), ", ".join(known))
    given = {known[name.upper()]: value for name, value in os.environ.items() if value and name.upper() in known}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        allowed = SWITCH if Settings.model_fields[field].annotation is bool else first["msg"]
        raise UnsupportedError(
            f"{variable(field)} is {shown(first['input'])}. {allowed}. Change or unset it."
        ) from error


def unknown_variables() -> list[str]:
    """Names of environment variables that start like a setting but name none. They are ignored."""
    known = {variable(field) for field in Settings.model_fields}
    return sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)


@functools.cache
def batch_invariant() -> bool:
    """Returns whether a token's result must not depend on the other tokens of the batch or on their number.

    This is vLLM's own variable, parsed as vLLM parses it, but read only once. `plan` decides what follows from it.

    Raises:
        UnsupportedError: the variable is not a number.
    """
    given = os.environ.get(BATCH_INVARIANT, "0")
    try:
        return bool(int(given))
    except ValueError:
        raise UnsupportedError(
            f"{BATCH_INVARIANT} is {shown(given)}. It should be 0 or 1. Change or unset it."
        ) from None


def _listed(names: list[str]) -> str:
    """Variable names for a message: at most LISTED_NAMES, quoted and truncated unless they are plain."""
    listed = [name if PLAIN_NAME.fullmatch(name) else shown(name) for name in names[:LISTED_NAMES]]
    more = len(names) - len(listed)
    return ", ".join(listed) + (f" and {more} more" if more else "")


def variable(field: str) -> str:
    return f"{PREFIX}{field.upper()}"


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Gives an environment variable a value for a while, then what it was before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
