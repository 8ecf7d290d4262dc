"""The pages of results are what docs/generate.py makes of the committed runs, and that is right."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from verbs import verb

from nmrun.lab.compare.names import PAPERS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
PAGES = sorted({path.stem for path in RESULTS.glob("*.md")} - {"index"})
# the tuned comparisons, and by how much their metric is multiplied where it is shown
TUNED = {
    "language": 1,
    "language_larger": 1,
    "wikitext": 1,
    "images": 100,
    "translation": 1,
    "finetuning": 100,
}
SDGF = sorted(path.stem for path in RESULTS.glob("*_sdgf.csv"))  # of the same pages
NAMES = {name: key for key, name in PAPERS.items()}


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return script("generate.py")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_the_generator_makes_of_its_runs(page, generate):
    """If not: ``python docs/generate.py``."""
    path = RESULTS / f"{page}.md"
    assert path in generate.results()
    assert generate.result(path) == path.read_text()


@pytest.mark.slow
def test_a_block_is_made_anew(generate, tmp_path):
    """Of a known comparison: A is above the baseline at both ratios, B below it at one, by far."""
    runs = tmp_path / "runs.csv"
    means = {
        ("dense", "dense"): 0.9,
        ("sr_ste", "2:4"): 0.7, ("sr_ste", "1:8"): 0.6,
        ("s_ste", "2:4"): 0.8, ("s_ste", "1:8"): 0.7,
        ("ste", "2:4"): 0.7, ("ste", "1:8"): 0.4,
    }  # fmt: skip
    lines = [
        f"digits,mlp,{recipe},{ratio},{seed},finished,accuracy,adam,{mean + 0.001 * (seed * (1 + place % 4) % 5)}"
        for place, ((recipe, ratio), mean) in enumerate(means.items())
        for seed in range(5)
    ]
    head = "dataset,model,recipe,sparsity,seed,status,metric,optimizer,test/accuracy"
    runs.write_text("\n".join([head, *lines]) + "\n")
    page = tmp_path / "page.md"
    command = f"nmrun table {runs} --baseline sr_ste"
    page.write_text(
        f"# Page\n\n<!-- findings: {command} -->\nold\n<!-- end -->\n\nWords.\n\n"
        f"<!-- differences: {command} -->\n<!-- end -->\n\n<!-- commands -->\n<!-- end -->\n"
    )
    text = generate.result(page)
    best, better, worse, lost = re.findall(r"^- .*\*\* (.*)\.$", text, re.M)
    assert best == better == "S-STE at every ratio"
    assert worse == "STE at 1:8"
    assert lost == "STE, SR-STE and S-STE at every ratio"
    assert "\nold\n" not in text
    assert "\nWords.\n" in text
    assert re.search(r"^\| s_ste +\| \+10", text, re.M)
    assert f"```bash\n{command}\n```" in text
    page.write_text(text)
    assert generate.result(page) == text


def test_the_picture_of_which_recipe_is_of_the_runs():
    picture = script("pictures/which_recipe.py")
    images, text = picture.cells(picture.TASKS[1]), picture.cells(picture.TASKS[2])
    for file, recipe, ratio, shown in (
        ("images", "s_ste", "1:8", images),
        ("images_sdgf", "sdgf_stepwise", "1:16", images),
        ("language", "step", "1:4", text),
    ):
        runs = pd.read_csv(RESULTS / f"{file}.csv", low_memory=False)
        dense = pd.read_csv(RESULTS / f"{file.removesuffix('_sdgf')}.csv", low_memory=False)
        metric, scale = ("test/accuracy", 100) if shown is images else ("test/perplexity", -1)
        runs, dense = (
            each[each["optimizer.name"] == ("sgd" if shown is images else "adam")].set_index("seed")
            for each in (runs, dense)
        )
        ours = runs[(runs.recipe == recipe) & (runs.sparsity == ratio)][metric]
        change = scale * (ours - dense[dense.recipe == "dense"][metric])
        assert len(change) == 5
        found = shown.loc[recipe, ratio]
        assert found.shown == pytest.approx(change.mean())


@pytest.mark.parametrize("files", [*TUNED, *SDGF])
def test_what_the_trials_found(files):
    """Settings are those of the runs, what validation gave is the mean of three seeds of the trials
    with these settings, FLOPs are over the dense ones.
    """
    runs = pd.read_csv(RESULTS / f"{files}.csv", low_memory=False)
    trials = pd.read_csv(RESULTS / f"{files}_trials.csv")
    page = files.removesuffix("_sdgf")
    cells = ["recipe", *(["optimizer"] if page == "images" else [])]
    ratio = runs.sparsity.where(runs.recipe != "dense", "")
    shown = found_by_trials(page, files in SDGF)
    assert len(shown) == runs.assign(sparsity=ratio).groupby([*cells, "sparsity"]).ngroups
    for row in shown:
        mine = runs[(runs[cells] == [row[key] for key in cells]).all(axis=1)]
        mine = mine[mine.sparsity == row["ratio"]] if row["recipe"] != "dense" else mine
        of = " ".join(filter(None, [row["recipe"], row["ratio"], row.get("optimizer")]))
        tried = trials[trials.cell == of]
        assert len(mine) == 5, of
        for key, said in settings(row).items():
            (used,) = mine[key].astype(str).unique()
            assert near(said, used), (of, key)
            tried = tried[tried[key].astype(str) == used]
        assert sorted(tried.seed) == [1000, 1001, 1002], of
        (validation,) = [text for key, text in row.items() if key.startswith("validation")]
        assert near(validation, TUNED[page] * tried.value.mean()), of
        first = trials[trials.cell == of].iloc[0]
        assert first.seed == 1000
        assert near(row["of the first trial"], TUNED[page] * first.value), of
        flops = mine["flops/training_arithmetic"] / mine["flops/training_dense"]
        assert near(row["FLOPs"], flops.mean()), of


def found_by_trials(page: str, sdgf: bool) -> list[dict[str, str]]:
    """The rows of a page's table of what the trials found, the one of all recipes or that of SdGf
    below it.
    """
    text = (RESULTS / f"{page}.md").read_text()
    tables = re.findall(r"^\| recipe .*ratio \| learning rate .*(?:\n\|.*)*", text, re.M)
    assert len(tables) == 1 + (f"{page}_sdgf" in SDGF)
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in tables[sdgf].split("\n")
    ]
    shown = [dict(zip(head, line, strict=True)) for line in lines]
    for row in shown:
        row["recipe"] = NAMES.get(row["recipe"], row["recipe"])
        if "optimizer" in row:
            row["optimizer"] = row["optimizer"].lower()
    return shown


def settings(row: dict[str, str]) -> dict[str, str]:
    own = [part.split() for part in row["its own"].replace("`", "").split(", ") if part]
    return {"optimizer.lr": row["learning rate"], **{f"recipe.{key}": text for key, text in own}}


def near(said: str, used: object) -> bool:
    """Whether a number is what is said of it, to its last digit, and a text the same."""
    try:
        digits, _, power = said.partition("e")
        last = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
        return abs(float(said) - float(str(used))) <= 0.501 * last
    except ValueError:
        return said == used


def test_the_recipes_pages_quote_the_table_of_the_digits(capsys):
    """Each row stands on a page, beside that of dense training."""
    computed = dict(rows(*table_of_digits(capsys)))
    assert len(computed) == 15
    quoted: set[str] = set()
    for page in sorted((ROOT / "docs/recipes").glob("*.md")):
        shown = dict(rows(*page.read_text().splitlines()))
        assert shown == {name: computed.get(name) for name in shown}, page.name
        assert not shown or "dense" in shown, page.name
        quoted |= set(shown)
    assert quoted == set(computed)


def table_of_digits(capsys, *words: str) -> list[str]:
    assert verb("table", str(ROOT / "docs/results/digits.csv"), *words) == 0
    return capsys.readouterr().out.splitlines()


def rows(*lines: str) -> list[tuple[str, list[str]]]:
    """A table's recipes with their means, without bold print and numbers of runs."""
    plain = [re.sub(r" \(\d+\)|\*\*|`", "", line) for line in lines if re.match(r"\|.*\+-", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]
    return [(name, values) for name, *values in cells]
