"""The README's table of settings says what settings.py says, no more and no less; other values and names are told."""

from pathlib import Path

import pytest

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.settings import Settings, settings
from tests import helpers as h

README = Path(__file__).parents[1] / "README.md"


def test_readme_lists_every_setting_with_its_default_and_meaning() -> None:
    documented = [line for line in README.read_text().splitlines() if line.startswith("| `FP8MOE_")]
    fields = Settings.model_fields.items()
    assert documented == [row(name, field.default, field.description) for name, field in fields]


def row(name: str, default: object, description: str | None) -> str:
    return f"| `FP8MOE_{name.upper()}` | {environment_value(default)} | {description} |"


def environment_value(default: object) -> str:
    """The default as one would write it into the environment; nothing stands for unset."""
    if default is None:
        return ""
    return f"`{int(default)}`" if isinstance(default, bool) else f"`{default}`"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("FP8MOE_BACKEND", "cuda", "'auto', 'sm90' or 'reference'"), ("FP8MOE_DEBUG", "maybe", "0 or 1")],
)
def test_a_value_that_is_not_allowed_is_refused(name: str, value: str, allowed: str) -> None:
    refused = pytest.raises(UnsupportedError, match=f"{name} is '{value}'. Input should be {allowed}. Change or unset")
    with h.environment(name, value), refused:
        settings()


def test_a_misspelt_variable_costs_one_warning(plugin_log: pytest.LogCaptureFixture) -> None:
    with h.environment("FP8MOE_BACKED", "reference"), h.environment("FP8MOE_DEBUG", "1"):
        settings()
        settings()
    known = "FP8MOE_BACKEND, FP8MOE_BUNDLE, FP8MOE_CACHE_DIR, FP8MOE_DEBUG, FP8MOE_JIT, FP8MOE_NVTX"
    assert plugin_log.messages == [f"fp8moe: ignores FP8MOE_BACKED; its variables are {known}"]
