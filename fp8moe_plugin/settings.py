"""Every FP8MOE_* environment variable, typed, with its default and one sentence."""

import functools
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="FP8MOE_", env_ignore_empty=True, frozen=True)

    backend: Literal["auto", "sm90", "reference"] = Field(
        "auto",
        description="`sm90`: our kernels; `reference`: plain torch; "
        "`auto`: our kernels on a Hopper GPU, else torch; under vLLM other GPUs are refused.",
    )
    cache_dir: Path | None = Field(
        None, description="Folder of the compiled kernels; default: the user's cache folder."
    )
    debug: bool = Field(
        False, description="Check device-side values (expert ids, counts) before each call; costs a sync."
    )


@functools.cache
def settings() -> Settings:
    """The settings of this process, read from the environment once."""
    return Settings()
