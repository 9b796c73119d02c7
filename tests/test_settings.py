"""The README's table of settings says what settings.py says, no more and no less."""

from pathlib import Path

from fp8moe_plugin.settings import Settings

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
