"""The figures in the sentences of docs/results/ and of README.md follow from the committed runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from scipy import stats
from verbs import verb

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
OPTIMIZERS = ("claims", "images")  # what SR-STE loses under Adam and under SGD stands there
PAGES = sorted(path.stem for path in RESULTS.glob("*.md") if path.stem != "index")
NUMBER = r"[\N{MINUS SIGN}+]?\d+(?:\.\d+)?"
DIFFERENCE = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")
P = re.compile(r"p=(\d(?:[\d.]*\d)?)")
CELLS = re.compile(r"(\d+) of (\d\d)\b")
# as claims.md names the recipes whose FLOPs it gives together
COSTS = {
    "SR-STE, STE and S-STE": ("sr_ste", "ste", "s_ste"),
    "STEP": ("step",),
    "ASP": ("asp",),
    "MdGf": ("mdgf_exponential",),
}


@pytest.mark.parametrize("page", PAGES)
def test_differences_with_intervals(page):
    """Each is in a table of the page's commands, or in that table with another row as the baseline:
    mean and both ends, to the decimals of the sentence, with either sign.
    """
    known = [tuple(map(value, found)) for found in DIFFERENCE.findall(tables(page))]
    known += [tuple(found[:3]) for found in losses().values() if page in OPTIMIZERS]
    for said in DIFFERENCE.findall(sentences(RESULTS / f"{page}.md")):
        assert any(same(said, (m, low, high)) for m, low, high in known), said


@pytest.mark.parametrize("page", PAGES)
def test_p_values(page):
    known = [float(found) for found in P.findall(tables(page))]
    known += [found[3] for found in losses().values() if page in OPTIMIZERS]
    for said in P.findall(sentences(RESULTS / f"{page}.md")):
        assert any(rounds(said, p) for p in known), said


@pytest.mark.parametrize("page", ["finetuning", "language_larger", "translation", "wikitext"])
def test_what_the_seeds_could_have_shown(page):
    """The smallest difference to SR-STE, and its range, are of the table's caption."""
    text = sentences(RESULTS / f"{page}.md")
    said = re.search(
        r"could have shown differences to SR-STE of (\S+) (?:\w+ )?\((\S+) to (\S+) by", text
    )
    assert said
    caption = output(["table", str(RESULTS / f"{page}.csv"), "--baseline", "sr_ste"])
    assert f"begins with: {said[1]} ({said[2]} to {said[3]})" in caption


def test_numbers_of_cells():
    """So many of so many cells, in which a recipe is the better one, or the worse one."""
    rows = [line for line in tables("claims").splitlines() if line.startswith("|")]
    counted = set(CELLS.findall("\n".join(rows)))
    counted |= {(str(int(all_) - int(better)), all_) for better, all_ in counted}
    said = CELLS.findall(sentences(RESULTS / "claims.md"))
    assert len(said) >= 4
    assert set(said) <= counted


def test_the_losses_under_two_optimizers():
    """The paired t-test of what SR-STE loses under Adam and under SGD: both pages have each, and the
    one that names the ratios has them in their places.
    """
    for page in OPTIMIZERS:
        every = DIFFERENCE.findall(sentences(RESULTS / f"{page}.md"))
        for ratio, found in losses().items():
            assert any(same(said, found[:3]) for said in every), (page, ratio)
    placed = re.findall(
        rf"{DIFFERENCE.pattern}(?: points)? at (\d+:\d+)", sentences(RESULTS / "claims.md")
    )
    assert {ratio for *_, ratio in placed} == set(losses())
    for *said, ratio in placed:
        assert same(tuple(said), losses()[ratio][:3]), ratio


def test_what_all_cells_cost():
    """The FLOPs of training over the dense ones: their range over the cells and their mean; how many
    runs there were, and for how long.
    """
    text, runs, trials = sentences(RESULTS / "claims.md"), compared(""), compared("_trials")
    runs["flops"] = runs["flops/training_arithmetic"] / runs["flops/training_dense"]
    cells = runs.groupby(["dataset", "optimizer", "sparsity", "recipe"]).flops.mean()
    by = cells.groupby("recipe").agg(["min", "max", "mean"])
    price = text[text.index("**The price.**") :]
    for name, recipes in COSTS.items():
        low, high = re.findall(rf"{name} (?:take )?(\d\.\d+) to (\d\.\d+)", price)[0]
        for recipe in recipes:
            assert rounds(low, by["min"][recipe]), recipe
            assert rounds(high, by["max"][recipe]), recipe
    gradual, moving = re.findall(
        r"takes (\S+) of the dense FLOPs where SR-STE takes (\S+) \(means over the cells\)", text
    )[0]
    assert rounds(gradual, by["mean"]["mdgf_exponential"])
    assert rounds(moving, by["mean"]["sr_ste"])
    said = re.findall(
        r"The (\S+) runs of seeds and the (\S+) of tuning took (\d+) hours of one core", text
    )[0]
    hours = (runs.seconds.sum() + trials.seconds.sum()) / 3600
    assert [int(number.replace(",", "")) for number in said] == [
        len(runs),
        len(trials),
        round(hours),
    ]


def test_the_readme():
    """Its counts and p-values are of the pages that it names."""
    text = sentences(ROOT / "README.md")
    known = [float(found) for page in ("claims", "images") for found in P.findall(tables(page))]
    assert {float(said) for said in P.findall(text)} <= set(known)
    assert set(CELLS.findall(text)) <= set(CELLS.findall(tables("claims")))


# --- what the pages say ---------------------------------------------------------------------------


def sentences(path: Path) -> str:
    """A page without its tables and blocks of code, in one line."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    return " ".join(line.strip() for line in text.splitlines() if not line.startswith("|"))


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|") and "+-" in line]


def value(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-"))


def half(text: str) -> float:
    """Half of the last decimal's unit."""
    return 0.5 * 10 ** -len(text.partition(".")[2])


def rounds(said: str, found: float) -> bool:
    """Whether a sentence's figure is the one found, rounded."""
    return abs(float(said) - found) <= half(said) + 1e-9


def same(said: tuple[str, ...], found: tuple[float, ...]) -> bool:
    """Whether a sentence's mean, low and high are those found, rounded, with either sign."""
    mean, low, high = found
    return any(
        # a little more than rounding moves: what is found may have been rounded before
        all(abs(value(a) - b) <= 1.1 * half(a) for a, b in zip(said, triple, strict=True))
        for triple in ((mean, low, high), (-mean, -high, -low))
    )


# --- what the runs say ----------------------------------------------------------------------------


@cache
def tables(page: str) -> str:
    """What the page's commands print, those of tables by recipe with every row as the baseline."""
    printed = []
    for command in re.findall(r"nmrun table docs/[^#\n`]*", (RESULTS / f"{page}.md").read_text()):
        words = [str(ROOT / w) if w.endswith(".csv") else w for w in shlex.split(command)[1:]]
        printed.append(output(words))
        if "--overall" not in words and "--rows" not in words:
            at = words.index("--baseline") if "--baseline" in words else len(words)
            others = {row.split("|")[1].strip() for row in table_rows(printed[-1])}
            printed += [
                output([*words[:at], *words[at + 2 :], "--baseline", other])
                for other in sorted(others)
            ]
    return "\n".join(printed)


def output(words: list[str]) -> str:
    """What a command prints; nothing where a row cannot be the baseline of its table."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        return out.getvalue() if verb(*words) == 0 else ""


def compared(which: str) -> pd.DataFrame:
    """All runs of the comparisons of claims.md, or all ``_trials``."""
    first = re.findall(r"nmrun table docs/[^#\n]*", (RESULTS / "claims.md").read_text())[0]
    files = re.findall(r"(\S+)\.csv", first)
    read = [pd.read_csv(ROOT / f"{file}{which}.csv", low_memory=False) for file in files]
    return pd.concat(read, ignore_index=True).copy()  # in one piece


@cache
def losses() -> dict[str, tuple[float, float, float, float]]:
    """By ratio SR-STE's loss to dense training under Adam less that under SGD, in points of test
    accuracy: mean, both ends of the 95 % interval, p.
    """
    runs = pd.read_csv(RESULTS / "images.csv", low_memory=False)
    dense = runs[runs.recipe == "dense"].set_index(["optimizer", "seed"])["test/accuracy"]
    found = {}
    for ratio, those in runs[runs.recipe == "sr_ste"].groupby("sparsity"):
        loss = 100 * (dense - those.set_index(["optimizer", "seed"])["test/accuracy"])
        test = stats.ttest_rel(loss["adam"].sort_index(), loss["sgd"].sort_index())
        low, high = test.confidence_interval()
        mean = loss["adam"].mean() - loss["sgd"].mean()
        found[ratio] = (float(mean), float(low), float(high), float(test.pvalue))
    return found
