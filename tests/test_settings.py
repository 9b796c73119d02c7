"""The table in docs/settings.md matches settings.py; invalid values and unknown names are reported."""

import os
import re
from pathlib import Path

import pytest

from fp8moe_plugin.errors import UnsupportedError
from fp8moe_plugin.settings import Settings, batch_invariant, settings, variable_set
from tests import helpers as h

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"


def test_the_document_lists_every_setting_with_its_default_and_meaning() -> None:
    documented = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `FP8MOE_")]
    fields = Settings.model_fields.items()
    assert documented == [row(name, field.default, field.description) for name, field in fields]


def row(name: str, default: object, description: str | None) -> str:
    return f"| `FP8MOE_{name.upper()}` | {environment_value(default)} | {description} |"


def environment_value(default: object) -> str:
    """Returns the default as a user would write it in the environment; empty for unset."""
    if default is None:
        return ""
    return f"`{int(default)}`" if isinstance(default, bool) else f"`{default}`"


SWITCHES = [f"FP8MOE_{name.upper()}" for name, field in Settings.model_fields.items() if field.annotation is bool]
ACCEPTED = "0 (or no, off, false) or 1 (or yes, on, true)"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FP8MOE_BACKEND", "cuda", "'auto', 'sm90', 'triton' or 'reference'"),
        *((name, value, re.escape(ACCEPTED)) for name in SWITCHES for value in ("maybe", "2", "-1", " 1")),
    ],
)
def test_a_value_that_is_not_allowed_is_refused(name: str, value: str, allowed: str) -> None:
    refused = pytest.raises(UnsupportedError, match=f"{name} is '{value}'. Input should be {allowed}. Change or unset")
    with h.environment(name, value), refused:
        settings()


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_takes_what_its_refusal_names(name: str) -> None:
    words = re.findall(r"\w+", ACCEPTED.replace("or ", ""))
    assert words == ["0", "no", "off", "false", "1", "yes", "on", "true"]
    for value in [*words, "True", "NO"]:
        with h.environment(name, value):
            chosen = getattr(settings(), name.removeprefix("FP8MOE_").lower())
        assert chosen == (value.lower() in ("1", "yes", "on", "true"))


@pytest.mark.parametrize("field", ["cache_dir", "bundle", "tuning"])
@pytest.mark.parametrize("path", ["$HOME/x", "${HOME}/x", "/data/$(USER)"])
def test_a_path_with_a_variable_is_refused(field: str, path: str) -> None:
    name = f"FP8MOE_{field.upper()}"
    refusal = f"{name} is '{path}'. Variables in a path are not expanded: write the path out, or use ~. Change or unset"
    with h.environment(name, path), pytest.raises(UnsupportedError, match=re.escape(refusal)):
        settings()
    with h.environment(name, "~/a$/$1"):
        assert getattr(settings(), field) == Path("~/a$/$1")


def test_a_misspelt_variable_costs_one_warning(plugin_log: pytest.LogCaptureFixture) -> None:
    with h.environment("FP8MOE_BACKED", "reference"), h.environment("FP8MOE_DEBUG", "1"):
        settings()
        settings()
    fields = (
        "BACKEND",
        "BUNDLE",
        "CACHE_DIR",
        "DEBUG",
        "EP",
        "FALLBACK",
        "FP4_EXPERTS",
        "INDEXER",
        "JIT",
        "JIT_DEBUG",
        "MERGE_SHARED_EXPERT",
        "NVTX",
        "PRINT_CONFIGS",
        "ROUTER",
        "TAKE_FP8",
        "TUNING",
    )
    known = ", ".join(f"FP8MOE_{field}" for field in fields)
    assert plugin_log.messages == [f"fp8moe: unknown variables are ignored: FP8MOE_BACKED. Known are {known}"]


LONG = "x" * 100_000 + "\x1b[31m\n"


@pytest.mark.parametrize("name", ["FP8MOE_BACKEND", "FP8MOE_DEBUG", "FP8MOE_JIT"])
def test_a_long_value_is_shown_cut_and_quoted(name: str) -> None:
    with h.environment(name, LONG), pytest.raises(UnsupportedError) as caught:
        settings()
    assert_short(str(caught.value), name, "Change or unset it.")


@pytest.mark.parametrize("value", [LONG, "9" * 100_000])
def test_a_long_value_of_batch_invariance_is_shown_cut_and_quoted(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    with pytest.raises(UnsupportedError) as caught:
        batch_invariant.__wrapped__()
    assert_short(str(caught.value), "VLLM_BATCH_INVARIANT", "Change or unset it.")


def test_unknown_names_are_shown_cut_and_quoted(
    monkeypatch: pytest.MonkeyPatch, plugin_log: pytest.LogCaptureFixture
) -> None:
    for i in range(500):
        monkeypatch.setenv(f"FP8MOE_{i:03}{LONG[-1000:]}", "1")
    with h.environment("FP8MOE_DEBUG", "1"):
        settings()
    (line,) = plugin_log.messages
    assert_short(line, "FP8MOE_000", "Known are FP8MOE_BACKEND")
    assert "and 490 more" in line


def assert_short(message: str, *words: str) -> None:
    assert len(message) < 5000
    assert message.isprintable()
    assert all(word in message for word in words)


@pytest.mark.parametrize("before", [None, "0"])
def test_a_variable_is_set_for_a_while(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_VARIABLE", raising=False)
    if before is not None:
        monkeypatch.setenv("A_VARIABLE", before)
    found: list[str | None] = []

    def fail() -> None:
        with variable_set("A_VARIABLE", "1"):
            found.append(os.environ.get("A_VARIABLE"))
            raise RuntimeError("a rank is missing")

    with pytest.raises(RuntimeError, match="missing"):
        fail()
    assert found == ["1"]
    assert os.environ.get("A_VARIABLE") == before
