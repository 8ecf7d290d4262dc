"""What the pages say of committed runs: what stands between ``<!-- KIND: COMMAND -->`` and
``<!-- end -->`` on which-recipe.md and on the pages of ``results/``. KIND is one of

- ``advice``, which recipe to take;
- ``table``, the first table that a command prints; ``differences``, the last one with its caption;
- ``say``, a sentence whose figures are of a command's table (``SENTENCE = COMMAND; ...``);
- ``findings``, the best recipes and what differs from the baseline; ``losses``, how often dense
  training is better;
- ``verdicts``, whether the papers' claims hold, a column a command (``NAME = COMMAND; ...``; after
  the name ``(exploratory)`` if the column decides nothing, ``(exploratory: ROW)`` for one row);
- ``lines``, a line for each difference of such commands, after ``TITLE: ``;
- ``held_out``, what choosing by the other tasks' runs gains in each task;
- ``contrast``, SR-STE's loss under Adam and under SGD, by files;
- ``commands``, those of the page.

``docs/generate.py`` writes it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from nmrun.lab.compare.comparison import ALL, ALL_BUT, Comparison, lines
from nmrun.lab.compare.notation import (
    interval,
    label,
    named,
    scale,
    signed,
    two_digits,
    words,
)
from nmrun.lab.compare.notation import written as in_papers
from nmrun.lab.compare.statistics import moderated, paired, summarise
from nmrun.lab.compare.tables import Table
from nmrun.lab.config.reference import ADVICE, BEGIN_WITH
from nmrun.lab.render import captions, cli, formats

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
BLOCK = re.compile(r"<!-- (?!picture)(\w+)(?:: ([^\n]*))? -->\n.*?<!-- end -->", re.S)
COLUMN = re.compile(r"(?:(.*?)(?: \((exploratory)(?:: (.*?))?\))? = )?(nmrun .*)")
PICTURE = re.compile(r"<!-- picture: (.*?) -->")
CLAIMS = {  # of a recipe, and where its row should stand to SR-STE
    "ste": ("SR-STE: a decay of the pruned weights helps", "behind"),
    "step": ("STEP: a dense start and a frozen second moment help", "ahead"),
    "s_ste": ("S-STE: a continuous forward pass trains better", "ahead"),
    "mdgf_exponential": ("MdGf: masks that fade in train better", "ahead"),
    "sdgf_stepwise": ("SdGf: masks that grow sparser in steps train better", "ahead"),
    "asp": ("ASP: pruning once and training on is enough", "ahead"),
}
TASKS = {  # the tuned comparisons by their data set
    "cifar10": "images",
    "shakespeare": "Shakespeare",
    "text": "WikiText-2",
    "multi30k": "translation",
    "glue": "fine-tuning",
}
VERDICTS = "**holds**", "**fails**", "undecided"
PLACES = "ahead", "behind", "not told apart"  # of an exploratory test, which decides no claim
FIGURE = re.compile(r"\{(\w+)((?: [^ }]+)*)\}")  # of a sentence: what it says, and of which cell


def results() -> list[Path]:
    """The pages with blocks that are made from committed runs."""
    return [path for path in sorted(RESULTS.glob("*.md")) if BLOCK.search(path.read_text("utf-8"))]


def result(path: Path) -> str:
    """The text of a page of results, its blocks made anew."""
    text = path.read_text(encoding="utf-8")

    def block(found: re.Match[str]) -> str:
        kind, command = found.groups()
        head = found[0].partition("\n")[0]
        return "\n".join([head, "", *BLOCKS[kind](command or text), "", "<!-- end -->"])

    return BLOCK.sub(block, text)


@cache
def compared(command: str) -> Comparison:
    """What a command ``nmrun table ...`` compares."""
    with contextlib.chdir(DOCS.parent):
        return cli.compared(cli.table_parser().parse_intermixed_args(shlex.split(command)[2:]))


def _advice(_: str) -> list[str]:
    """Which recipe to take, by what one trains."""
    return [BEGIN_WITH, "", *_rows(["what you train", "take"], [list(row) for row in ADVICE])]


def upper(text: str) -> str:
    """With a capital letter in front."""
    return text[:1].upper() + text[1:]


def _table(command: str) -> list[str]:
    found = compared(command)
    tables = found.tables if found.overall else found.tables[:1]
    grid = formats.over_all_cells(found) if found.overall else formats.values(*tables)
    notes = " ".join(f"{upper(note)}." for note in captions.by_data_set(tables, captions.cautions))
    return [_markdown(grid), "", notes] if notes else [_markdown(grid)]


def _differences(command: str) -> list[str]:
    *_, grid = formats.grids(compared(command).tables[-1])
    return [*(f"{upper(line)}." for line in grid.caption), "", _markdown(grid)]


def _markdown(grid: formats.Grid) -> str:
    """A table without its caption."""
    return formats.markdown(replace(grid, caption=[])).strip()


def _cells(command: str) -> pd.DataFrame:
    """The sparse cells of a table: their ``name``, the ``labels`` in it beside the recipe, ``at`` which
    ratio, and whether they are significantly ``ahead`` of the baseline or ``behind`` it.
    """
    head, *rows = lines(compared(command))
    found = pd.DataFrame(rows, columns=head)
    found = found[found.recipe != "dense"]
    if "--overall" in command:
        found = found[~found.dataset.str.startswith((ALL, ALL_BUT))]
        found = found.assign(at="on " + found.dataset)
        sign = 1
    else:
        found = found.assign(at="at " + found.sparsity)
        sign = _sign(command)

    def own(cell: pd.Series) -> list[str]:
        return [named(key, in_papers(cell[key])) for key in _labels(found) if cell[key] != "-"]

    shown = sign * found.difference.where(found.p < 0.05) if "p" in found else 0
    labels = [own(cell) for _, cell in found.iterrows()]
    names = [
        in_papers(recipe) + (f" ({', '.join(some)})" if some else "")
        for recipe, some in zip(found.recipe, labels, strict=True)
    ]
    return found.assign(name=names, labels=labels, ahead=shown > 0, behind=shown < 0)


def _sign(command: str) -> int:
    """1 where more of a table's metric is better, else -1."""
    table = compared(command).tables[0]
    return 1 if table.higher_is_better(table.metric) else -1


def _labels(found: pd.DataFrame) -> list[str]:
    """What tells a table's rows apart beside the recipe."""
    others = ("dataset", "model", "recipe", "sparsity")
    return [key for key in [*found][: _first([*found])] if key not in others]


def _first(head: list[str]) -> int:
    """Where the figures of a table begin."""
    return head.index("cells" if "cells" in head else "metric")


def _findings(part: str) -> list[str]:
    """The best recipes, and which differ from the baseline, in registered and exploratory tests."""
    ((_, exploratory, command),) = _parts(part)
    found, said = _cells(command), []
    if "best" in found:
        said += [f"**Best sparse mean of the first table:** {_spoken(found, found.best == 1)}."]
    if "p" in found:
        found = found[found.difference.notna()]  # without the baseline
        marked = found.recipe.isin(exploratory) | found["labels"].map(
            lambda labels: not {*exploratory}.isdisjoint(labels)
        )
        sides = {
            "Better": found.ahead & ~marked,
            "Worse": found.behind & ~marked,
            "Better, exploratory": found.ahead & marked,
            "Worse, exploratory": found.behind & marked,
        }
        texts = {side: _spoken(found, where) for side, where in sides.items()}
        shown = [f"{side}: {text}." for side, text in texts.items() if text]
        word = "[Significant](../statistics.md#significant)"
        whom = in_papers(_baseline(command)).replace("dense", "dense training")
        said += [f"**{word} differences to {whom}.** {' '.join(shown) or 'None.'}"]
    return [f"- {line}" for line in said]


def _baseline(command: str) -> str:
    """The recipe, or the first label, of what a table compares with."""
    words = shlex.split(command)
    return words[words.index("--baseline") + 1].split()[0]


def _say(text: str) -> list[str]:
    """A sentence with the figures of its tables, one command for each or one for all. A figure is
    named by what the sentence says there and by the labels of its cell: ``{ahead ste 1:8}``.
    Fails if the table does not say so.
    """
    sentence, _, rest = text.partition(" = nmrun ")
    commands = f"nmrun {rest}".split("; ")
    asked = FIGURE.findall(sentence)
    if len(commands) == 1:
        commands *= len(asked)
    for (word, labels), command in zip(asked, commands, strict=True):
        said = _figure(word, labels.split(), command)
        if said is None:
            raise SystemExit(f"no longer true: {sentence}\n  {word}{labels}: {command}")
        sentence = sentence.replace(f"{{{word}{labels}}}", said, 1)
    return [f"- {sentence}"]


def _figure(word: str, labels: list[str], command: str) -> str | None:
    """The figure of a cell: how far it is significantly ``ahead`` of the baseline or ``behind`` it,
    the least difference that an ``undecided`` test could have found, its ``mean``, or how many
    ``times`` the baseline's mean it is. None where that is not so.
    """
    found = _cells(command)
    places = found.iloc[:, : _first([*found])]
    here = found[[Counter(labels) <= Counter(row) for row in places.itertuples(index=False)]]
    if len(here) != 1:
        raise SystemExit(f"{len(here)} cells are {' '.join(labels)}: {command}")
    cell = here.iloc[0]
    metric = cell.get("metric", "deviations")
    if word == "mean":
        return _rounded(cell["mean"], metric)
    if word == "times":
        return f"{cell['mean'] / (cell['mean'] - cell.difference):.2f}"
    if word == "undecided":
        return None if cell.ahead or cell.behind else _rounded(cell.least, metric)
    return _rounded(abs(cell.difference), metric) if cell[word] else None


def _rounded(size: float, metric: str) -> str:
    """With one digit after the point where it is a percentage, with two digits otherwise."""
    return f"{100 * size:.1f}" if scale(metric) == 100 else two_digits(size, metric)


def _losses(command: str) -> list[str]:
    """How many recipes dense training is significantly ahead of, by ratio."""
    found = _cells(f"{command} --baseline dense")
    found = found[found.difference.notna()]
    shown = _counted(found, found.behind)
    return [f"- **Recipes significantly worse than dense training (exploratory):** {shown}."]


def _verdicts(commands: str) -> list[str]:
    """What tables against SR-STE say of each paper's claim, a column a task. Tests that decide
    nothing are in italics.
    """
    columns: dict[str, dict[str, str]] = {}
    for name, exploratory, command in _parts(commands):
        found = _verdicts_of(command, exploratory)
        for data, column in found.items():
            columns.setdefault(TASKS[data] if len(found) > 1 else name, {}).update(column)
    rows = [
        [claim, *(column.get(recipe, "-") for column in columns.values())]
        for recipe, (claim, _) in CLAIMS.items()
        if any(recipe in column for column in columns.values())
    ]
    return _rows(["claim", *columns], rows)


def _held_out(commands: str) -> list[str]:
    """What a choice of recipe gains over always taking SR-STE, in deviations of a run, by task. Three
    seeds choose and the others judge, for every choice of three: those of the task itself, a
    recipe for each ratio; or those of the tasks with other data, one recipe for all ratios.
    """
    tasks = {name: _gains(command) for name, _, command in _parts(commands)}
    rows, lost = [], []
    for name, (data, gains) in tasks.items():
        others = [other for of, other in tasks.values() if of != data]
        known, new, named_by_others = [], [], []
        for three in itertools.combinations(gains.index.unique("seed"), 3):
            of_others = pd.concat([_over(other, three).mean() for other in others], axis=1)
            best = of_others.mean(axis=1, skipna=False).idxmax()  # of the recipes that all have
            judged = _over(gains.drop(list(three), level="seed"))
            own = _over(gains, three).idxmax(axis=1)
            known.append(np.mean([judged.at[ratio, recipe] for ratio, recipe in own.items()]))
            new.append(judged[best].mean())
            named_by_others.append(in_papers(best))
        means = [float(np.mean(values)) for values in (known, new)]
        if means[1] < -1:
            lost.append(name)
        figures = [signed(mean, "deviations", 1) for mean in means]
        rows.append([name, *figures, _listed(sorted({*named_by_others}))])
    where = f"In {_listed(lost)} the other tasks' choice" if lost else "In no task that choice"
    head = ["task", "its own runs choose", "the other tasks choose", "what they name"]
    return [*_rows(head, rows), "", f"{where} loses more than a deviation of a run."]


def _gains(command: str) -> tuple[str, pd.DataFrame]:
    """The data set of a table, and how far each recipe is ahead of SR-STE by ratio and seed, in the
    median deviation of the column's recipes. A failed seed counts as the recipe's worst other run.
    """
    found = _cells(command)
    columns = {}
    for ratio, cells in found.groupby("sparsity", sort=False):
        runs = map(pd.Series, cells["values"], cells.seeds)
        column = _sign(command) * pd.DataFrame(dict(zip(cells.recipe, runs, strict=True)))
        column = column.fillna(column.min())
        columns[ratio] = column.sub(column.sr_ste, axis=0) / cells.sd.median()
    return found.dataset.iloc[0], pd.concat(columns, names=["ratio", "seed"])


def _over(gains: pd.DataFrame, seeds: Sequence[int] | None = None) -> pd.DataFrame:
    """Means by ratio over seeds, over all for None."""
    some = gains if seeds is None else gains[gains.index.isin(seeds, level="seed")]
    return some.groupby(level="ratio", sort=False).mean()


def _parts(commands: str) -> Iterator[tuple[str, list[str], str]]:
    """Of each command its name, and which of its recipes and settings are exploratory."""
    for part in commands.split("; "):
        column = COLUMN.fullmatch(part)
        assert column, part
        name, marked, recipes, command = column.groups()
        yield name, (recipes.split(", ") if recipes else [*CLAIMS]) if marked else [], command


def _rows(head: list[str], cells: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]


def _verdicts_of(command: str, exploratory: list[str]) -> dict[str, dict[str, str]]:
    """By data set and recipe, whether its claim holds over the cells there, and by how many
    deviations of a run; of one that is not decided the least that could have been found. Of a
    recipe with several rows the first counts.
    """
    verdicts: dict[str, dict[str, str]] = {}
    found = _cells(command)
    for _, row in found.drop_duplicates(["dataset", "recipe"]).iterrows():
        if row.recipe not in CLAIMS:
            continue
        _, side = CLAIMS[row.recipe]
        mark, undecided = ("*", "*undecided*") if row.recipe in exploratory else ("**", "undecided")
        for_it = signed(row.difference if side == "ahead" else -row.difference, "deviations", 1)
        if row.recipe == "step" and not _decided(command, row[["recipe", *_labels(found)]]):
            text = f"not in its regime, {for_it}"
        elif row.ahead or row.behind:
            text = f"{mark}{'holds' if row[side] else 'fails'}{mark} {for_it}"
        elif pd.isna(row.least):  # the table has no third row, whose spread is the unit
            raise SystemExit(f"{row.recipe} is not tested: {command}")
        else:
            text = f"{undecided} ({row.least:.1f})"
        verdicts.setdefault(row.dataset, {})[row.recipe] = text
    return verdicts


def _decided(command: str, labels: Mapping[str, str]) -> bool:
    """Whether a rule of STEP's decided the switch in any run with a row's labels."""
    return any(
        run.get("switched_by") == "rule"
        and all(label(run[key]) == text for key, text in labels.items())
        for table in compared(command).tables
        for run in table.records
    )


def _late(table: Table) -> str:
    """A mark where STEP switched at its latest step in all runs of a table."""
    counts = captions.switches(table)
    return " (t_max)" if counts["t_max"] and not counts["rule"] else ""


def _lines(text: str) -> list[str]:
    """What tables of differences say of a claim, a line a cell, but for the rows of the baseline's
    recipe.
    """
    head, _, commands = text.partition(": ")
    said = []
    for name, exploratory, command in _parts(commands):
        table, verdicts = compared(command).tables[-1], PLACES if exploratory else VERDICTS
        for row, column in itertools.product(table.rows, table.columns):
            gap = table.differences.get((row, column))
            if gap is None or row[0] == _baseline(command):
                continue
            worse = (gap.mean < 0) == (_sign(command) > 0)
            word = verdicts[2 if not gap.significant else 1 if worse else 0]
            figure = interval(gap.mean, gap.low, gap.high, table.metric, gap.error)
            own = [
                named(key, text)
                for key, text in zip(table.row_keys[1:], row[1:], strict=True)
                if text != "null"
            ]
            where = ", ".join([name, *own, words(table.column_keys, column)])
            said.append([where, f"{word}: {figure}{_late(table)}"])
    return _rows(["where", head], said)


def _contrast(files: str) -> list[str]:
    """By how much more SR-STE loses to dense training under Adam than under SGD, for each of Adam's
    settings: by seed, the mean over the ratios.
    """
    metric = "test/accuracy"
    rows = []
    for name, file in (part.split(" = ") for part in files.split("; ")):
        runs = pd.read_csv(DOCS.parent / file, low_memory=False)
        # a tuned recipe has a rate of its own in each cell
        keys = ["optimizer"] if "tuned.trials" in runs else ["optimizer", "optimizer.lr"]
        lost = {}
        for at, some in runs.groupby(keys):
            dense, sparse = (
                some[some.recipe == recipe].groupby("seed")[metric].mean()
                for recipe in ("dense", "sr_ste")
            )
            lost[at] = summarise((dense - sparse).to_dict())
        (sgd,) = (lost.pop(at) for at in [*lost] if at[0] == "sgd")
        for at, cell in lost.items():
            gap = paired(cell, sgd, 0.0)
            assert gap, file
            gap = moderated({at: gap})[at]
            rate = "".join(f" at {rate:g}" for rate in at[1:])
            figure = interval(gap.mean, gap.low, gap.high, metric, gap.error)
            rows.append([f"{name}, {in_papers(at[0])}{rate}", f"{figure} ({gap.n})"])
    return _rows(["Adam against SGD", "loss under Adam - loss under SGD, in points"], rows)


def _spoken(found: pd.DataFrame, where: pd.Series) -> str:
    """Recipes and ratios in words: a recipe's own labels only where they matter, and recipes with
    the same ratios together. Their numbers where the words would be too many.
    """
    places: dict[str, list[str]] = {}
    for (recipe, at), some in found.assign(where=where).groupby(["recipe", "at"], sort=False):
        names = [in_papers(recipe)] if some["where"].all() else some.name[some["where"]]
        for name in names:
            places.setdefault(name, []).append(at)
    every = found["at"].nunique()
    alike: dict[str, list[str]] = {}
    for name, at in places.items():
        word, *_ = at[0].split()
        everywhere = "at every ratio" if word == "at" else "on every data set"
        text = everywhere if len(at) == every > 1 else _listed(at).replace(f" {word} ", " ")
        alike.setdefault(text, []).append(name)
    words = "; ".join(f"{_listed(names)} {at}" for at, names in alike.items())
    return words if len(words.split()) <= 22 else _counted(found, where)


def _counted(found: pd.DataFrame, where: pd.Series) -> str:
    counts = where.groupby(found["at"], sort=False).agg(["sum", "count"])
    if counts["count"].nunique() > 1:
        return _listed([f"{row['sum']} of {row['count']} {at}" for at, row in counts.iterrows()])
    word, *_ = counts.index[0].split()
    where = _listed([*counts.index]).replace(f" {word} ", " ")
    return f"{_listed([*counts['sum'].astype(str)])} of {counts['count'].iloc[0]} {where}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _commands(text: str) -> list[str]:
    """Every command that a table or a picture of the page comes from."""
    found = re.findall(r"<!-- [^\n]*-->", text)
    found = re.findall(r"nmrun (?:table|plot) .*?(?=; | -->)", "\n".join(found))
    return ["```bash", *dict.fromkeys(found), "```"]


BLOCKS = {
    "advice": _advice,
    "table": _table,
    "differences": _differences,
    "say": _say,
    "findings": _findings,
    "losses": _losses,
    "verdicts": _verdicts,
    "held_out": _held_out,
    "lines": _lines,
    "contrast": _contrast,
    "commands": _commands,
}
