"""The recipes are what `python -m benchmarks.recipes` writes, and the site has them."""

import re

import pytest

from benchmarks import recipes
from benchmarks.recipe_models import RECIPES, Recipe
from benchmarks.tables import ROOT, TABLES, results
from warmup.target import GPUS


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return {path.name: text for path, text in recipes.pages().items()}


def test_the_pages_are_current(written: dict[str, str]) -> None:
    found = {path.name: path.read_text() for path in recipes.FOLDER.iterdir()}
    assert found == written, "run python -m benchmarks.recipes"


def test_the_site_has_each_page(written: dict[str, str]) -> None:
    (navigation,) = re.findall(r"- Recipes: \[([^]]*)\]", (ROOT / "mkdocs.yml").read_text())
    assert navigation.split(", ") == [f"recipes/{name}" for name in written]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.page)
def test_a_page_has_the_commands_of_each_split(recipe: Recipe, written: dict[str, str]) -> None:
    commands = written[f"{recipe.page}.md"].replace(" \\\n       ", "")
    for choice in recipes.choices(recipe):
        assert choice.split.fits
        assert f"    {choice.split.vllm}\n" in commands
        assert f"    {choice.split.sglang}\n" in commands
    rows = {choice.gpu for choice in recipes.choices(recipe)}
    assert all(GPUS[gpu].name in written[f"{recipe.page}.md"] for gpu in recipes.PEAKS)
    assert rows


def test_the_page_of_v3_2_names_the_release_and_the_experiment(written: dict[str, str]) -> None:
    text = " ".join(written["deepseek-v3.2.md"].split())
    assert "vllm serve deepseek-ai/DeepSeek-V3.2-Exp " in text
    assert "The commands are the same for `deepseek-ai/DeepSeek-V3.2`." in text


def test_splits_of_fewer_gpus_are_first_and_name_their_gpus(written: dict[str, str]) -> None:
    starts = re.findall(r"^`(--.*?)` on (.*?): [a-z]", written["deepseek-v4-flash.md"], re.MULTILINE | re.DOTALL)
    gpus = [re.findall(r"(\d+) x (H\d+)", of) for _, of in starts]
    assert [options for options, _ in starts] == ["--tp 2", "--tp 4", "--tp 8", "--tp 1 --dp 8 --ep 8"]
    assert gpus[:2] == [[("2", "H200"), ("2", "H20")], [("4", "H100")]]
    assert "4 x H100 80GB (fewest GPUs)" in starts[1][1]


@pytest.mark.parametrize(
    ("page", "shape"),
    [("deepseek-v4-flash", "V4-Flash EP1"), ("deepseek-v4-pro", "V4-Pro EP8"), ("gpt-oss", "gpt-oss-120b")],
)
def test_pages_of_mxfp4_have_its_times(page: str, shape: str, written: dict[str, str]) -> None:
    (name,) = TABLES["mxfp4-layers"].names
    found = [row for row in results(name)["rows"] if row["shape"] == shape]
    assert found
    text = written[f"{page}.md"]
    assert "in block FP8 (" not in text
    for row in found:
        best = min(us for us in row["peers"].values() if not isinstance(us, str))
        assert f"| {row['tokens']:,} | {row['us']:,.0f} | {row['fp8_us']:,.0f} | {best:,.0f} |" in text


def test_floors_follow_from_bytes_and_operations() -> None:
    """DeepSeek-V3 has 37 billion active parameters, of which 0.9 are the output head's."""
    (recipe,) = (recipe for recipe in RECIPES if recipe.page == "deepseek-v3")
    assert recipes.products(recipes.model_of(recipe)) == pytest.approx(2 * 36.1e9, rel=0.03)
    choice = next(choice for choice in recipes.choices(recipe) if choice.gpu == "h200")
    *_, one, many, prefill = recipes.row(recipe, choice)
    assert choice.split.read_bytes
    assert float(one) == pytest.approx(choice.split.read_bytes / 4.8e9, abs=0.05)
    assert float(one) < float(many)
    assert float(prefill) == pytest.approx(2 * 36.1e9 * 8192 / (8 * 1.979e12), rel=0.05)
