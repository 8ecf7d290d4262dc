"""Write what the pages say of the config's keys and of the committed runs, from where these are.

``python docs/generate.py`` writes the pages of ``configs/``, one for each group, and when to use it
on every page about recipes. On which-recipe.md and the pages of ``results/`` it writes what stands
between ``<!-- KIND: COMMAND -->`` and ``<!-- end -->``. KIND is one of

- ``advice``, which recipe to take;
- ``table``, the first table that a command prints; ``differences``, the last one with its caption;
- ``findings``, the best recipes and what differs from the baseline; ``losses``, how often dense
  training is better; ``leads``, what is better than the baseline in most cells;
- ``verdicts``, whether the papers' claims hold, a column a command (``NAME = COMMAND; ...``), or one
  a data set for ``--overall``. After the name there may stand ``(exploratory)`` if the column decides
  nothing, ``(exploratory: ROW, ...)`` for some rows, and ``(outside: ROW, ROW at DATA SET, ...)``
  for recipes that were not tested in their regime;
- ``settings``, what the trials beside the command's runs chose;
- ``commands``, those of the page.

``python docs/generate.py pictures`` draws the pictures of these pages as well, by the commands in
``<!-- picture: COMMAND -->``.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import inspect
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pandas as pd

from nmrun import ranges
from nmrun.lab import cli
from nmrun.lab.compare.comparison import ALL, ALL_BUT
from nmrun.lab.compare.notation import interval, named, two_digits
from nmrun.lab.compare.notation import written as in_papers
from nmrun.lab.compare.statistics import moderated, paired, summarise
from nmrun.lab.keys import recipe_table
from nmrun.lab.keys.recipe_facts import of_class
from nmrun.lab.show import formats
from nmrun.lab.words import reference
from nmrun.lab.words.advice import ADVICE, BEGIN_WITH
from nmrun.lab.words.reference import Key, Option
from nmrun.recipes import RECIPES
from nmrun.registry import imported

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
BLOCK = re.compile(r"<!-- (?!picture)(\w+)(?:: ([^\n]*))? -->\n.*?<!-- end -->", re.S)
COLUMN = re.compile(r"(?:(.*?)((?: ?\((?:exploratory|outside)[^)]*\))*) = )?(nmrun .*)")
MARK = re.compile(r"\((exploratory|outside)(?:: ([^)]*))?\)")
PICTURE = re.compile(r"<!-- picture: (.*?) -->")
KEY = re.compile(r"recipe|[a-z]+\.\w+")  # what heads a column of row labels
RECIPE_OF_PAGE = re.compile(r"^`recipe=(\w+)`", re.M)
CLAIMS = {  # of a recipe, and where its row should stand to SR-STE
    "ste": ("a decay of the pruned weights helps (SR-STE; STE has none)", "behind"),
    "step": ("a dense start and a frozen second moment help under Adam (STEP)", "ahead"),
    "s_ste": ("a continuous forward pass trains better (S-STE)", "ahead"),
    "mdgf_exponential": ("masks that fade in train better (MdGf)", "ahead"),
    "sdgf_stepwise": ("masks that grow sparser in steps train better (SdGf)", "ahead"),
    "asp": ("pruning once and training on is enough (ASP)", "ahead"),
}
VERDICTS = "**holds**", "**fails**", "undecided"
OUTSIDE = "not tested in its regime"
PLACES = "ahead", "behind", "not told apart"  # of an exploratory test, which decides no claim
HEAD = """# {title}

<!-- Written by docs/generate.py from nmrun/lab/keys/, nmrun/papers/ and nmrun/recipes/. -->

"""
INDEX = """Every key with its meaning, the values that it takes and its default: what `nmrun help KEY` says.
`nmrun --cfg job` prints a whole config with its values.

| group | what it chooses |
|---|---|
"""
TABLE = DOCS.parent / "nmrun/lab/keys/recipe_table.py"
recipe_table.TABLE.clear()  # the pages are made of the classes themselves
TABLE_HEAD = '''"""What the classes of ``nmrun.recipes`` say. Written by docs/generate.py."""

# ruff: noqa
# fmt: off
from nmrun import ranges
from nmrun.lab.keys.fields import Field, RecipeFacts

TABLE = {
'''
RECIPE = """What each recipe does, in a line, and its keys. `nmrun help recipe=NAME` says more of one.
[Which recipe?](../which-recipe.md) helps to choose."""
OTHER = """What each of them is, and its keys: what `nmrun help {group}=NAME` prints. Those with the same keys
share a section."""


def pages() -> dict[Path, str]:
    """The text of every page that is written, or has a section that is."""
    written = {DOCS / "configs" / f"{group}.md": _page(group) for group in reference.GROUPS}
    written[DOCS / "configs/index.md"] = _index()
    recipes = {option.name: option for option in reference.options("recipe")}
    for path, names in _pages_of_recipes().items():
        head, _, rest = path.read_text(encoding="utf-8").partition("## When to use\n\n")
        _, _, below = rest.partition("\n\n")
        use = _uses([recipes[name] for name in names])
        written[path] = f"{head}## When to use\n\n{use}\n\n{below}"
    written[TABLE] = _recipe_table()
    path = DOCS / "which-recipe.md"
    written[path] = result(path)
    return written


def _recipe_table() -> str:
    """The module of what the classes of recipes say, for commands that must not import torch."""
    lines = []
    for path in RECIPES.values():
        kind = imported(path, path)
        facts = of_class(kind)
        keys = {
            key: f"Field({field.default!r}, {_ranges_of(kind, key)}, meaning={field.meaning!r})"
            for key, field in facts.keys.items()
        }
        lines.append(
            f"    {path!r}: RecipeFacts(\n        title={facts.title!r},\n"
            f"        takes_blocks={facts.takes_blocks},\n        about={facts.about!r},\n"
            f"        module={facts.module!r},\n        keys={{\n"
            + "".join(f"            {key!r}: {text},\n" for key, text in keys.items())
            + "        },\n    ),"
        )
    return TABLE_HEAD + "\n".join(lines) + "\n}\n"


def _ranges_of(kind: type, key: str) -> str:
    """The check and the search of a key, as code."""
    check = search = None
    for base in kind.__mro__:
        annotation = ast.parse(inspect.get_annotations(base).get(key, "None"), mode="eval")
        for part in ast.walk(annotation):
            code = ast.unparse(part) if isinstance(part, ast.Call | ast.Name) else ""
            value = eval(code, vars(ranges)) if code.partition("(")[0] in vars(ranges) else None
            if isinstance(value, ranges.Check):
                check = check or f"ranges.{code}"
            elif isinstance(value, ranges.Search):
                search = search or f"ranges.{code}"
    return f"{check}, {search}"


def _advice(_: str) -> list[str]:
    """Which recipe to take, by what one trains."""
    return [BEGIN_WITH, "", *_markdown(["what you train", "take"], [list(row) for row in ADVICE])]


def _uses(options: list[Option]) -> str:
    """When to use the recipes of a page: the first paragraph of that section."""
    uses = {option.name: _cell(option.use.removeprefix("When to use: ")) for option in options}
    if len(uses) == 1:
        return _upper(*uses.values())
    return "\n".join(f"- `{name}`: {use}" for name, use in uses.items())


def _index() -> str:
    """The page of all groups, with the keys that are in none."""
    lines = [f"| [`{group}`]({group}.md) | {_chosen(group)} |" for group in reference.GROUPS]
    own = ["", "## In no group", "", *_keys(reference.options(""))]
    return HEAD.format(title="Config keys") + INDEX + "\n".join([*lines, *own]) + "\n"


def _chosen(group: str) -> str:
    options = reference.options(group)
    if not options[0].name:
        return _cell(options[0].about)
    return ", ".join(f"`{option.name}`" for option in options)


def _page(group: str) -> str:
    options = reference.options(group)
    if not options[0].name:
        lines = [_cell(options[0].about), "", *_keys(options)]
    else:
        lines = [RECIPE if group == "recipe" else OTHER.format(group=group)]
        lines += [line for some in _alike(options) for line in _section(some)]
    return HEAD.format(title=group) + "\n".join(lines) + "\n"


def _alike(options: list[Option]) -> list[list[Option]]:
    """The options by section: those whose keys mean the same share one. Each recipe has its own."""
    found: dict[object, list[Option]] = {}
    for option in options:
        keys = tuple((key.name, key.meaning, key.takes) for key in option.keys)
        found.setdefault(option.name if option.group == "recipe" else keys, []).append(option)
    return [*found.values()]


def _section(options: list[Option]) -> list[str]:
    """What options are, and their keys."""
    lines = ["", f"## {', '.join(option.name for option in options)}"]
    for option in options:
        of = f"`{option.name}`: " if len(options) > 1 else ""
        lines += ["", of + _cell(option.about) + _more(option)]
    keys = _keys(options)
    return [*lines, *([""] if keys else []), *keys]


def _more(option: Option) -> str:
    """A link to the page of a recipe."""
    pages = _pages_of_recipes() if option.group == "recipe" else {}
    found = [page.name for page, names in pages.items() if option.name in names]
    return f" [More](../recipes/{found[0]})." if found else ""


@cache
def _pages_of_recipes() -> dict[Path, list[str]]:
    """The recipes that each page is of."""
    return {
        path: names
        for path in sorted((DOCS / "recipes").glob("*.md"))
        if (names := RECIPE_OF_PAGE.findall(path.read_text(encoding="utf-8")))
    }


def _keys(options: list[Option]) -> list[str]:
    """An item for each key: a list is readable at any width, a table is not."""
    return [
        _item(key, defaults)
        for name in dict.fromkeys(key.name for key in options[0].keys)
        for key, defaults in reference.key_meanings(name, options).items()
    ]


def _item(key: Key, defaults: dict[str, list[str]]) -> str:
    shown = [
        f"`{value}`" + (f" ({', '.join(alike)})" if len(defaults) > 1 else "")
        for value, alike in defaults.items()
    ]
    facts = [f"Takes {_cell(key.takes)}" if key.takes else "", f"default {', '.join(shown)}"]
    meaning = _cell(key.meaning).rstrip(".")
    return f"- **`{key.name}`**: {meaning}. {_upper('; '.join(filter(None, facts)))}."


def _cell(text: str) -> str:
    """Without the marks of reStructuredText, and with those of Markdown as they are."""
    plain = re.sub(r":\w+:(?=`)|``", lambda mark: "`" * (mark[0] == "``"), " ".join(text.split()))
    parts = re.split(r"(`[^`]*`)", plain)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\|*_])", r"\\\1", p.replace("<", "&lt;"))
        for p in parts
    )


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


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
def _printed(command: str) -> list[str]:
    """What a command of ``nmrun`` prints, by paragraph."""
    out = io.StringIO()
    before, sys.argv = sys.argv, shlex.split(command)
    try:
        with contextlib.chdir(DOCS.parent), contextlib.redirect_stdout(out):
            if cli.main():
                raise SystemExit(f"failed: {command}")
    finally:
        sys.argv = before
    return out.getvalue().strip().split("\n\n")


def _table(command: str) -> list[str]:
    caption, table, *_ = _printed(command)
    notes = [note for line in caption.splitlines()[2:] for note in line.split("; ")]
    cautions = " ".join(f"{_upper(n)}." for n in notes if not n.startswith("made by"))
    return [table, *["", cautions] * bool(cautions)]


def _differences(command: str) -> list[str]:
    *_, caption, table = _printed(command)
    return [*(f"{_upper(line)}." for line in caption.splitlines()), "", table]


def _cells(command: str) -> pd.DataFrame:
    """The sparse cells of a table: their ``name``, the ``labels`` in it beside the recipe, ``at`` which
    ratio, and whether they are significantly ``ahead`` of the baseline or ``behind`` it.
    """
    text = "\n\n".join(_printed(f"{command} --format csv"))
    found = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""])
    found = found[found.recipe != "dense"]
    if "--overall" in command:
        found = found[~found.dataset.str.startswith((ALL, ALL_BUT))]
        found = found.assign(at="on " + found.dataset)
        sign = 1
    else:
        found = found.assign(at="at " + found.sparsity)
        sign = -1 if found.metric.iloc[0].endswith("perplexity") else 1

    def own(cell: pd.Series) -> list[str]:
        return [named(key, in_papers(str(cell[key]))) for key in _labels(found) if cell[key] != "-"]

    shown = sign * found.difference.where(found.p < 0.05) if "p" in found else 0
    labels = [own(cell) for _, cell in found.iterrows()]
    names = [
        in_papers(recipe) + (f" ({', '.join(some)})" if some else "")
        for recipe, some in zip(found.recipe, labels, strict=True)
    ]
    return found.assign(name=names, labels=labels, ahead=shown > 0, behind=shown < 0)


def _labels(found: pd.DataFrame) -> list[str]:
    """What tells a table's rows apart beside the recipe."""
    others = ("dataset", "model", "recipe", "sparsity")
    first = [*found].index("cells" if "cells" in found else "metric")
    return [key for key in [*found][:first] if key not in others]


def _findings(part: str) -> list[str]:
    """The best recipes, and which differ from the baseline, in registered and exploratory tests."""
    ((_, marks, command),) = _parts(part)
    exploratory, found, said = marks["exploratory"], _cells(command), []
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
        said += [f"**{word} differences to {_reference(command)}.** {' '.join(shown) or 'None.'}"]
    return [f"- {line}" for line in said]


def _baseline(command: str) -> str:
    """The recipe, or the first label, of what a table compares with."""
    words = shlex.split(command)
    return words[words.index("--baseline") + 1].split()[0]


def _reference(command: str) -> str:
    return in_papers(_baseline(command)).replace("dense", "dense training")


def _losses(command: str) -> list[str]:
    """How many recipes dense training is significantly ahead of, by ratio."""
    found = _cells(f"{command} --baseline dense")
    found = found[found.difference.notna()]
    shown = _counted(found, found.behind)
    return [f"- **Recipes significantly worse than dense training (exploratory):** {shown}."]


def _leads(command: str) -> list[str]:
    """Which rows are better than the baseline in most cells; of a table over all cells."""
    counts = _cells(command).groupby("name", sort=False)[["better", "cells"]].sum()
    names = _listed([*counts.index[counts.better > counts.cells / 2]]) or "no recipe"
    return [f"- **Ahead of {_reference(command)} in most cells:** {names}."]


def _verdicts(commands: str) -> list[str]:
    """What tables against SR-STE say of each paper's claim, a column a table."""
    columns: dict[str, dict[str, str]] = {}
    for name, marks, command in _parts(commands):
        for place, column in _verdicts_of(command, marks).items():
            columns[", ".join(filter(None, [name, place]))] = column
    rows = [
        [f"{claim} | `{recipe}`", *(column.get(recipe, "-") for column in columns.values())]
        for recipe, (claim, _) in CLAIMS.items()
        if any(recipe in column for column in columns.values())
    ]
    return _markdown(["claim", "row", *columns], rows)


def _parts(commands: str) -> Iterator[tuple[str, dict[str, list[str]], str]]:
    """Of each command its name, and which of its recipes and settings are marked."""
    for part in commands.split("; "):
        column = COLUMN.fullmatch(part)
        assert column, part
        name, marks, command = column.groups()
        marked: dict[str, list[str]] = {"exploratory": [], "outside": []}
        for mark, which in MARK.findall(marks or ""):
            marked[mark] = which.split(", ") if which else [*CLAIMS]
        yield name, marked, command


def _markdown(head: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def _csv(file: str) -> list[str]:
    """A file of few lines as it is."""
    with (DOCS.parent / file).open(encoding="utf-8", newline="") as text:
        head, *lines = csv.reader(text)
    return _markdown(head, lines)


def _verdicts_of(command: str, marks: dict[str, list[str]]) -> dict[str, dict[str, str]]:
    """By data set and recipe, whether its claim holds in a table of one column of differences, the
    figure there, and of what is undecided the smallest difference that could have been seen. Of
    exploratory ones only whether they are ahead or behind: they decide no claim. Of a recipe with
    several rows the first counts: as published. Without ``--overall`` the data set is not named.
    """
    found = _cells(command)
    head, _, *lines = (
        [*map(str.strip, line[1:-1].split("|"))] for line in _printed(command)[-1].splitlines()
    )
    several = "--overall" in command
    columns = [data for data in found.dataset.unique() if data in head] if several else head[-1:]
    figures: dict[tuple[str, str], str] = {}
    for line in lines:
        for column in columns or ["all cells"]:
            figures.setdefault((line[0], column), line[head.index(column)].partition(" p")[0])
    late = _late(command)
    verdicts: dict[str, dict[str, str]] = {}
    for _, row in found.drop_duplicates(["recipe", "dataset"]).iterrows():
        if row.recipe not in CLAIMS or row.recipe == _baseline(command):
            continue
        place = row.dataset if several else ""
        side, words = CLAIMS[row.recipe][1], VERDICTS
        if row.recipe in marks["exploratory"]:
            side, words = "ahead", PLACES
        word = words[0 if row[side] else 1 if row.ahead or row.behind else 2]
        if {row.recipe, f"{row.recipe} at {place}"} & {*marks["outside"]}:
            word = OUTSIDE
        column = (row.dataset if row.dataset in head else "all cells") if several else head[-1]
        text = f"{word}: {figures[row.recipe, column]}"
        if word == VERDICTS[2] and row.least == row.least:
            metric = "" if several else row.metric
            text += f", {two_digits(row.least, metric)} could be seen"
        verdicts.setdefault(place, {})[row.recipe] = text + (late if row.recipe == "step" else "")
    return verdicts


def _late(command: str) -> str:
    """A mark where STEP switched at its latest step in all runs of a table."""
    caption = " ".join(_printed(command))
    never = "decided its switch in 0 of" in caption and "not known whether" not in caption
    return " (t_max)" if never else ""


def _lines(text: str) -> list[str]:
    """What tables of differences say of a claim, a line a cell, but for the rows of the baseline's
    recipe.
    """
    head, _, commands = text.partition(": ")
    lines = []
    for name, marks, command in _parts(commands):
        caption, *_, table = _printed(command)
        places, _, *rows = ([*map(str.strip, line[1:-1].split("|"))] for line in table.splitlines())
        labels = sum(bool(KEY.fullmatch(place)) for place in places)
        words = PLACES if marks["exploratory"] else VERDICTS
        more_is_better = "perplexity" not in caption
        for row in rows:
            if row[0] == _baseline(command):
                continue
            keys = zip(places[1:labels], row[1:labels], strict=True)
            own = [named(key, value) for key, value in keys if value != "null"]
            for place, figure in zip(places[labels:], row[labels:], strict=True):
                worse = figure.startswith("\N{MINUS SIGN}") == more_is_better
                word = words[2 if "*" not in figure else 1 if worse else 0]
                found = f"{word}: {figure.partition(' p')[0]}{_late(command)}"
                lines.append([", ".join([name, *own, place]), found])
    return _markdown(["where", head], lines)


def _contrast(files: str) -> list[str]:
    """By how much more SR-STE loses to dense training under Adam than under SGD, for each of Adam's
    settings: by seed, the mean over the ratios.
    """
    metric = "test/accuracy"
    lines = []
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
            lost[at] = summarise((dense - sparse).to_dict(), [])
        (sgd,) = (lost.pop(at) for at in [*lost] if at[0] == "sgd")
        for at, cell in lost.items():
            gap = paired(cell, sgd, 0.0)
            assert gap, file
            gap = moderated({at: gap})[at]
            rate = "".join(f" at {rate:g}" for rate in at[1:])
            figure = interval(gap.mean, gap.low, gap.high, metric, gap.error)
            lines.append([f"{name}, {in_papers(at[0])}{rate}", f"{figure} ({gap.n})"])
    return _markdown(["Adam against SGD", "loss under Adam - loss under SGD, in points"], lines)


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


def _settings(command: str) -> list[str]:
    """The learning rate of each cell and what else the trials varied, at the table's places."""
    words = shlex.split(command)
    file = DOCS.parent / words[2]
    runs, trials = (
        pd.read_csv(path, dtype=str, keep_default_na=False, low_memory=False)
        for path in (file, file.with_name(f"{file.stem}_trials.csv"))
    )
    for key, _, values in (word.partition("=") for word in words if "=" in word):
        runs = runs[runs[key].isin(values.split(","))]
    if "cell" in trials:
        trials["recipe"] = trials.cell.str.split().str[0]
    varied = {
        recipe: [key for key in some if key.startswith("recipe.") and some[key].nunique() > 1]
        for recipe, some in trials.groupby("recipe")
    }

    def setting(run: pd.Series) -> str:
        own = [key for key in varied.get(run.recipe, []) if run[key] not in ("", "null")]
        shown = [f"{key.removeprefix('recipe.')} {_short(run[key])}" for key in own]
        return ", ".join([_short(run["optimizer.lr"]), *shown])

    keys = words[words.index("--rows") + 1].split(",") if "--rows" in words else ["recipe"]
    runs = runs.assign(setting=runs.apply(setting, axis=1))
    chosen = runs.groupby([*keys, "sparsity"]).setting.unique().map("; ".join)
    table = [text.strip("|").split("|") for text in _table(command)[0].splitlines()]
    head, _, *rows = [[cell.strip() for cell in row] for row in table]
    for row in rows:
        labels = row[: len(keys)]
        dense = chosen.get((*labels, "dense"), "-")
        row[len(keys) :] = [chosen.get((*labels, ratio), dense) for ratio in head[len(keys) :]]
    return [formats.aligned(head, rows).rstrip()]


def _short(value: object) -> str:
    try:
        return f"{float(str(value)):.3g}"
    except ValueError:
        return f"`{value}`"


def _commands(text: str) -> list[str]:
    """Every command that a table or a picture of the page comes from."""
    found = re.findall(r"<!-- [^\n]*-->", text)
    found = re.findall(r"nmrun (?:table|plot) .*?(?=; | -->)", "\n".join(found))
    return ["```bash", *dict.fromkeys(found), "```"]


BLOCKS = {
    "advice": _advice,
    "table": _table,
    "differences": _differences,
    "findings": _findings,
    "losses": _losses,
    "leads": _leads,
    "settings": _settings,
    "verdicts": _verdicts,
    "lines": _lines,
    "contrast": _contrast,
    "csv": _csv,
    "commands": _commands,
}


def draw() -> None:
    """Draw the pictures of the pages of results, and the one of which recipe to take."""
    for path in results():
        for command in PICTURE.findall(path.read_text(encoding="utf-8")):
            _printed(command)
    for script in ("which_recipe.py", "retraining.py"):
        subprocess.run([sys.executable, DOCS / "pictures" / script], check=True)


if __name__ == "__main__":
    if "pictures" in sys.argv[1:]:
        draw()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path in results():
        path.write_text(result(path), encoding="utf-8")
