"""The tables of docs/results/ are what the commands on their pages print from the committed runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from verbs import verb

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
# all but the list of pages, and the one that puts several commands' columns into one table
PAGES = sorted({path.stem for path in RESULTS.glob("*.md")} - {"index", "one_shot"})
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
NAMES = {
    "ASP": "asp",
    "SR-STE": "sr_ste",
    "S-STE": "s_ste",
    "MdGf, exponential": "mdgf_exponential",
    "SdGf, stepwise": "sdgf_stepwise",
}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_the_page_s_commands_print(page, capsys):
    text = (RESULTS / f"{page}.md").read_text()
    commands = re.findall(r"^nmrun table docs/[^#\n]*", text, re.M)
    assert commands
    printed: list[str] = []
    for command in commands:
        words = [
            str(ROOT / word) if word.endswith(".csv") else word for word in shlex.split(command)
        ]
        assert verb(*words[1:]) == 0
        printed += [line for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    shown = [line for line in text.splitlines() if re.match(r"\|.*(\+-|p[=<\\])", line)]
    assert len(shown) > 10
    assert set(shown) <= set(printed)


def test_the_picture_of_which_recipe_is_of_the_runs():
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs/pictures/which_recipe.py")
    picture = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = picture  # dataclasses look there
    spec.loader.exec_module(picture)
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
        if "FLOPs" in row:
            flops = mine["flops/training_arithmetic"] / mine["flops/training_dense"]
            assert near(row["FLOPs"], flops.mean()), of


def found_by_trials(page: str, sdgf: bool) -> list[dict[str, str]]:
    """The rows of a page's table of what the trials found, the one of all recipes or that of SdGf
    below it; a recipe stands in its first row alone.
    """
    text = (RESULTS / f"{page}.md").read_text()
    tables = re.findall(r"^\| recipe .*learning rate .*(?:\n\|.*)*", text, re.M)
    assert len(tables) == 1 + (f"{page}_sdgf" in SDGF)
    table = tables[sdgf]
    head, _, *lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")
    ]
    ratios = re.findall(r"sparsity=(\d+:\d+) ", text)
    shown: list[dict[str, str]] = []
    for line in lines:
        row = {"ratio": "", **dict(zip(head, line, strict=True))}
        name = row["recipe"]
        row["recipe"] = NAMES.get(name, name.lower()) if name else shown[-1]["recipe"]
        if "optimizer" in row:
            row["optimizer"] = row["optimizer"].lower()
        if "ratio" not in head and row["recipe"] != "dense":
            row["ratio"] = ratios[0]
        shown.append(row)
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


def test_no_recipe_is_shown_to_differ_from_sr_ste_on_the_digits(capsys):
    """The page says so, with the number of comparisons and the one that comes nearest."""
    lines = table_of_digits(capsys, "--baseline", "sr_ste")
    tested = re.findall(r"(\S+ \[\S+ \S+\]) p=([\d.]+)", "\n".join(lines))
    difference, p = min(tested, key=lambda found: float(found[1]))
    assert float(p) > 0.05
    text = " ".join((ROOT / "docs/results/digits.md").read_text().split())
    assert f"Of {len(tested)} differences to SR-STE none is significant" in text
    assert f"({difference}, p={p})" in text


def table_of_digits(capsys, *words: str) -> list[str]:
    assert verb("table", str(ROOT / "docs/results/digits.csv"), *words) == 0
    return capsys.readouterr().out.splitlines()


def rows(*lines: str) -> list[tuple[str, list[str]]]:
    """A table's recipes with their means, without bold print and numbers of runs."""
    plain = [re.sub(r" \(\d+\)|\*\*|`", "", line) for line in lines if re.match(r"\|.*\+-", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in plain]
    return [(name, values) for name, *values in cells]
