"""Write what the pages say of the config's keys and of the committed runs, from where these are.

``python docs/generate.py`` writes the pages of ``configs/``, one for each group, and the sections on
use and on hyperparameters of every page about recipes. On the pages of ``results/`` it writes what
stands between ``<!-- KIND: COMMAND -->`` and ``<!-- end -->``. KIND is one of

- ``table``, the first table that a command prints; ``differences``, the last one with its caption
  (``table of adam``: its columns of Adam alone);
- ``findings``, what a table with a baseline shows, in a line each;
- ``trials``, what the trials of a comparison found; the command is the name of its CSV;
- ``commands``, those of the page.

``python docs/generate.py pictures`` draws the pictures of these pages as well, by the commands in
``<!-- picture: COMMAND -->``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd

import nmrun
from nmrun.lab import cli
from nmrun.lab.compare.names import written as in_papers
from nmrun.lab.words import reference
from nmrun.lab.words.reference import Key, Option
from nmrun.recipes import RECIPES

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
BLOCK = re.compile(r"<!-- (?!picture)(\w+)(?: of (\w+))?(?:: ([^\n]*))? -->\n.*?<!-- end -->", re.S)
PICTURE = re.compile(r"<!-- picture: (.*?) -->")
RATIOS = ["2:4", "1:4", "1:8", "1:16"]
HEAD = """# {title}

<!-- Written by docs/generate.py from nmrun/lab/keys/, nmrun/papers/ and nmrun/recipes/. -->

"""
INDEX = """Every key with its meaning, the values that it takes and its default: what `nmrun help KEY` says.
`nmrun --cfg job` prints a whole config with its values.

| group | what it chooses |
|---|---|
"""


def pages() -> dict[Path, str]:
    """The text of every page that is written, or has a section that is."""
    written = {DOCS / "configs" / f"{group}.md": _page(group) for group in reference.GROUPS}
    written[DOCS / "configs/index.md"] = _index()
    recipes = {option.name: option for option in reference.options("recipe")}
    for path in sorted((DOCS / "recipes").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^`recipe=(\w+)`", text, re.M)
        if names and "## Hyperparameters\n" in text:
            mine = [recipes[name] for name in names]
            lines = _keys(mine)
            before, _, after = text.partition("## Hyperparameters\n")
            rest = after[after.index("\n## ") :] if "\n## " in after else ""
            head, _, rest_of_before = before.partition("## When to use\n\n")
            _, _, below = rest_of_before.partition("\n\n")
            before = f"{head}## When to use\n\n{_uses(mine)}\n\n{below}"
            written[path] = f"{before}## Hyperparameters\n\n" + "\n".join(lines) + "\n" + rest
    return written


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
        lines = [f"- **`{group}={option.name}`**: {_cell(option.about)}" for option in options]
        lines += ["", "## Keys", "", *_keys(options)]
    return HEAD.format(title=group) + "\n".join(lines) + "\n"


def _keys(options: list[Option]) -> list[str]:
    """An item for each meaning of each key: a list is readable at any width, a table is not."""
    names = dict.fromkeys(key.name for option in options for key in option.keys)
    items = [
        _item(key, defaults, len(options))
        for name in names
        for key, defaults in reference.alike(name, options).items()
    ]
    return items or ["None."]


def _item(key: Key, defaults: dict[str, list[str]], count: int) -> str:
    holders = sorted(name for alike in defaults.values() for name in alike)
    shown = [
        f"`{value}`" + (f" ({', '.join(alike)})" if len(defaults) > 1 else "")
        for value, alike in defaults.items()
    ]
    of = f" ({', '.join(f'`{name}`' for name in holders)})" if len(holders) < count else ""
    facts = [f"Takes {_cell(key.takes)}" if key.takes else "", f"default {', '.join(shown)}"]
    meaning = _cell(key.meaning).rstrip(".")
    return f"- **`{key.name}`**{of}: {meaning}. {_upper('; '.join(filter(None, facts)))}."


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
        kind, part, command = found.groups()
        head = found[0].partition("\n")[0]
        return "\n".join([head, "", *BLOCKS[kind](command or text, part or ""), "", "<!-- end -->"])

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


def _table(command: str, part: str) -> list[str]:
    return _columns(_printed(command)[1], part)


def _differences(command: str, part: str) -> list[str]:
    *_, caption, table = _printed(command)
    said = [f"{_upper(line)}." for line in caption.splitlines()]
    return [*said, "", *_columns(table, part)]


def _columns(table: str, part: str) -> list[str]:
    """The lines of a table, with the columns of one part alone, whose heads then do without it."""
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    if not part:
        return ["|".join(["", *row, ""]) for row in rows]
    kept = [i for i, name in enumerate(rows[0]) if i == 0 or name.strip().startswith(f"{part} ")]
    rows = [[row[i].replace(f"{part} ", "").ljust(len(row[i])) for i in kept] for row in rows]
    return ["|".join(["", *row, ""]) for row in rows if {cell.strip() for cell in row[1:]} != {"-"}]


def _findings(command: str, part: str) -> list[str]:
    """The best recipes, what differs from the baseline and what from dense training."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="+")
    parser.add_argument("--cols")
    parser.add_argument("--baseline")
    asked = vars(parser.parse_args(shlex.split(command)[2:]))
    asked["path"] = [str(DOCS.parent / file) for file in asked["path"]]
    name = in_papers(asked["baseline"])
    found, dense = nmrun.table(**asked), nmrun.table(**{**asked, "baseline": "dense"})
    lower = found.metric[0].endswith("perplexity")

    def lines(head: str, frame: pd.DataFrame, worse: bool | None = None) -> Iterator[str]:
        """A line for each optimizer; of the best means where ``worse`` is None."""
        frame = frame[frame.recipe != "dense"]
        chosen = frame.best
        if worse is not None:
            chosen = (frame.p < 0.05) & ((frame.difference > 0) == (worse == lower))
        under = frame.get("optimizer", pd.Series("", frame.index))
        for optimizer, some in frame[chosen].groupby(under[chosen], sort=False):
            cells = zip(some.recipe, some.sparsity, strict=True)
            where = f"{in_papers(optimizer)}: " if optimizer else ""
            yield f"- **{head}:** {where}{_spoken(cells, set(frame.sparsity))}."
        if not chosen.any():
            yield f"- **{head}:** no recipe."

    word = "[Significantly](../statistics.md#significant)"
    said = [*lines("Best mean of the sparse recipes", found)]
    if asked["baseline"] != "dense":
        said += [*lines(f"{word} better than {name}", found, worse=False)]
        said += [*lines(f"{word} worse than {name}", found, worse=True)]
        said += [*lines("Worse than dense training (exploratory)", dense, worse=True)]
    else:
        said += [*lines(f"{word} worse than dense training", dense, worse=True)]
    return sorted(said, key=lambda line: line.endswith(" no recipe."))  # findings first


def _spoken(cells: Iterable[tuple[str, str]], every: set[str]) -> str:
    """Recipes and ratios in words, recipes with the same ratios together."""
    ratios: dict[str, list[str]] = {}
    for recipe, ratio in cells:
        ratios.setdefault(in_papers(recipe), []).append(ratio)
    alike: dict[str, list[str]] = {}
    for name, where in ratios.items():
        at = "at every ratio" if set(where) == every and len(every) > 1 else f"at {_listed(where)}"
        alike.setdefault(at, []).append(name)
    return "; ".join(f"{_listed(names)} {at}" for at, names in alike.items())


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _trials(name: str, part: str) -> list[str]:
    """The settings of a comparison's runs, what they gave on the validation split with three seeds,
    what the config's own, which are the first trial, gave with one, and FLOPs over dense ones.
    """
    runs = pd.read_csv(RESULTS / f"{name}.csv", low_memory=False)
    trials = pd.read_csv(RESULTS / f"{name}_trials.csv")
    several = runs.optimizer.nunique() > 1
    metric = runs.metric[0]
    scale, digits = {"accuracy": (100, 1), "perplexity": (1, 2)}.get(metric, (1, 1))
    head = ["recipe", *["optimizer"] * several, "ratio", "learning rate", "its own"]
    rows = [[*head, f"validation {metric.replace('bleu', 'BLEU')}", "of the first trial", "FLOPs"]]
    rows += [["---"] * len(rows[0])]
    for cell in sorted(trials.cell.unique(), key=_place):
        recipe, *rest = cell.split()
        optimizer = [rest.pop()] if several else []
        ratio = rest[0] if rest else "dense"
        mine = runs[(runs.recipe == recipe) & (runs.sparsity == ratio)]
        mine = mine[mine.optimizer == optimizer[0]] if several else mine
        tried = trials[trials.cell == cell].dropna(axis=1, how="all")
        first = tried.value.iloc[0]
        keys = [key for key in tried if key == "optimizer.lr" or key.startswith("recipe.")]
        used = mine[keys].iloc[0]
        tried = tried[(tried[keys].astype(str) == used.astype(str)).all(axis=1)]
        own = ", ".join(f"{key.partition('.')[2]} {_short(used[key])}" for key in keys[1:])
        flops = (mine["flops/training_arithmetic"] / mine["flops/training_dense"]).mean()
        rows += [
            [in_papers(recipe), *(in_papers(each) for each in optimizer)]
            + [ratio.replace("dense", ""), _short(used["optimizer.lr"]), own]
            + [f"{scale * value:.{digits}f}" for value in (tried.value.mean(), first)]
            + [f"{flops:.2f}"]
        ]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _place(cell: str) -> tuple[str, int, int]:
    """Where a cell of the trials stands: by optimizer, ratio and recipe."""
    recipe, *rest = cell.split()
    ratio = next((RATIOS.index(word) for word in rest if word in RATIOS), -1)
    return "".join(word for word in rest if word not in RATIOS), ratio, list(RECIPES).index(recipe)


def _short(value: object) -> str:
    try:
        return f"{float(str(value)):.3g}"
    except ValueError:
        return f"`{value}`"


def _commands(text: str, part: str) -> list[str]:
    """Every command that a table or a picture of the page comes from."""
    found = re.findall(r"<!-- [^:]*: (nmrun (?:table|plot) .*?) -->", text)
    return ["```bash", *dict.fromkeys(found), "```"]


BLOCKS = {
    "table": _table,
    "differences": _differences,
    "findings": _findings,
    "trials": _trials,
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
