"""Help: ``nmrun --help``, which recipe to take, and the meaning, values and default of every key.

The pages of keys and which-recipe.md are made from here too. No torch.
"""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError
from nmrun.lab.config import experiment
from nmrun.lab.config.suggestions import option as option_line
from nmrun.lab.config.suggestions import written
from nmrun.lab.keys import options as kinds
from nmrun.lab.keys.options import Field, recipe_facts
from nmrun.patterns import Pattern
from nmrun.ranges import value_text
from nmrun.recipes import RECIPES, installed
from nmrun.registry import did_you_mean, no_such

GROUPS = kinds.GROUPS
WORDS = {  # words of a command that are no keys of a config
    "experiment": "experiment=NAME scale=smoke|small|paper: the runs of a paper's table or figure, a sweep (-m).",
    "launcher": "launcher=joblib|slurm|ray: in a sweep (-m) jobs side by side; launcher.KEY= are its own settings.",
    "scale": "scale=smoke|small|paper: how large an experiment's runs are; default small.",
    "zip": "zip=KEY,KEY: in a sweep (-m) the values of these keys go together, not in all combinations.",
    "debug": "debug=fast: a few batches through everything, in seconds; no tracker; into outputs/.debug.",
    "recipe=custom": "recipe._target_=MODULE.CLASS: a recipe of your own; recipe=custom need not be said.",
}

# Which recipe to take for what one trains. It follows from the committed comparisons, so a change there
# changes it here. For every task that no comparison has, in Markdown; links are relative to docs/.
BEGIN_WITH = (
    "From scratch take [S-STE](recipes/s_ste.md), in fine-tuning [SR-STE](recipes/sr_ste.md), "
    "unless your task is listed below."
)
# What one trains, and what to take.
ADVICE = (
    ("images from scratch", "SR-STE up to 1:4, then [SdGf](recipes/sdgf.md) (`sdgf_stepwise`)"),
    (
        "text from scratch",
        "a language model: S-STE, with a tuned learning rate. Translation: [MdGf](recipes/mdgf.md) "
        "(`mdgf_exponential`), or S-STE for far fewer multiplications",
    ),
    (
        "a pretrained encoder, fine-tuned",
        "for [three epochs of CoLA](results/finetuning.md#three-epochs-of-cola-at-24) at 2:4 "
        "[STEP](recipes/step.md); in a hundred steps [ASP](recipes/asp.md) at 2:4, the simplest; SR-STE "
        "or [STE](recipes/ste.md) from 1:4 on",
    ),
    (
        "a trained language model, to be pruned",
        "[SparseGPT](pruning.md), then [ASP with a dense teacher](results/retraining.md); "
        "[AST](recipes/ast.md) at 1:4",
    ),
    (
        "with nothing tuned",
        "images under Adam: [STEP](recipes/step.md) with `recipe.switch=0.5`. [A language "
        "model](results/step.md#short-runs-with-nothing-tuned): that STEP up to 1:4, S-STE at 1:16",
    ),
    (
        "for thousands of steps",
        "[images](results/step.md): SdGf, or STEP with `recipe.switch=0.5`; SR-STE for fewer "
        "multiplications. [Text](results/step.md#other-dense-starts): MdGf; S-STE "
        "for fewer",
    ),
)


@dataclass(frozen=True)
class Key:
    """A key of one option. The same key can mean something else in another option.

    ``name`` is with its group, such as ``recipe.decay``. ``takes`` are the allowed values in words;
    empty where any is. ``default`` is as a command line has it.
    """

    name: str
    meaning: str
    takes: str
    default: str


@dataclass(frozen=True)
class Option:
    """An option of a group, such as ``recipe=sr_ste``. ``trainer`` has one, without a name; so have
    the keys in no group.

    Of a recipe, ``more`` is its paper, what it does and what it costs, and ``use`` when to use it.
    """

    group: str
    name: str
    about: str
    keys: tuple[Key, ...]
    more: str = ""
    use: str = ""


def options(group: str, config_dir: str | None = None) -> list[Option]:
    """The options of a group (empty: the keys in none), first those that come with nmrun, recipes
    in their papers' order.

    Raises ConfigError for a config of one's own that cannot be read.
    """
    if group in ("", *kinds.UNNAMED):
        return [_of_class(group, "")]
    if group == "recipe":
        builtin = [_recipe(name, path) for name, path in {**RECIPES, **installed()}.items()]
    else:
        builtin = [_of_class(group, name) for name in sorted(kinds.names(group))]
    return builtin + [_preset(group, file) for file in kinds.in_folder(config_dir).get(group, ())]


def _of_class(group: str, name: str) -> Option:
    about = (inspect.getdoc(kinds.kind(group, name)) or "").partition("\n\n")[0]
    return Option(group, name, " ".join(about.split()), _keys(group, kinds.keys(group, name)))


def _recipe(name: str, path: str) -> Option:
    """A recipe, of another package too, whose docstring may have any form."""
    try:
        facts = recipe_facts(path)
    except Exception:  # what is wrong with it a run will say
        return Option("recipe", name, path, ())
    about, use = [*facts.about.split("\n\n"), ""][:2]
    about, keys = " ".join(about.split()) or path, _keys("recipe", facts.keys)
    if name not in RECIPES:
        return Option("recipe", name, about, keys)
    return Option("recipe", name, about, keys, facts.module, use)


def _preset(group: str, file: Path) -> Option:
    """A user's own preset: what it sets. What the keys mean is said of the option that it builds on."""
    content = kinds.read_yaml(file, str(file))
    values = content if isinstance(content, dict) else {}
    unsaid = ("name", "_target_", "defaults")
    fields = {str(key): Field(value, None) for key, value in values.items() if key not in unsaid}
    return Option(group, file.stem, str(file), _keys(group, fields))


def _keys(group: str, fields: Mapping[str, Field]) -> tuple[Key, ...]:
    return tuple(
        Key(f"{group}.{key}".lstrip("."), field.meaning, _takes(field), _text(field.default))
        for key, field in fields.items()
    )


def _takes(field: Field) -> str:
    tuned = f"nmrun tune tries {field.search}" if field.search else ""
    return "; ".join(filter(None, ["" if field.check is None else field.check.allowed, tuned]))


def _text(value: Any) -> str:
    """A value as a command line has it: a text in a list in quotes where it is no plain word."""
    if not isinstance(value, list):
        return value_text(value)
    plain = (str(item) if re.fullmatch(r"[\w.-]+", str(item)) else f"'{item}'" for item in value)
    return f"[{', '.join(plain)}]"


def key_meanings(name: str, among: list[Option]) -> dict[Key, dict[str, list[str]]]:
    """The meanings of a key among options, each with its defaults and the options that have these."""
    meanings: dict[tuple[str, str], tuple[Key, dict[str, list[str]]]] = {}
    for option in among:
        for key in option.keys:
            if key.name == name:
                _, defaults = meanings.setdefault((key.meaning, key.takes), (key, {}))
                defaults.setdefault(key.default, []).append(option.name)
    return dict(meanings.values())


def about(topic: str, config_dir: str | None = None, others: Iterable[str] = ()) -> str:
    """What a key (``trainer.epochs``), a group (``recipe``), an option (``recipe=step``, ``step``)
    or another word of a command (``experiment``) means, which values it takes and what it is by
    default.

    Raises ConfigError for any other word, with the nearest that there is, ``others`` included.
    """
    lines = [*_about(topic, config_dir)]
    if not lines:
        what, hint = "key, group, option or verb", _hint(topic, others)
        raise ConfigError(f"{topic}: {no_such(what, topic, (), hint=hint)}")
    return "\n".join(lines)


def _about(topic: str, config_dir: str | None) -> Iterator[str]:
    group, equals, name = topic.partition("=")
    if group == "experiment" and name:
        yield from _experiment(name)
    elif word := WORDS.get(topic) or WORDS.get(group):
        yield from _wrap(word, "", "    ")
        if group == "experiment":
            for found in experiment.selection("all"):
                line = f"experiment={found.name}: {found.title} ({found.source})"
                yield from _wrap(line, "", "    ")
    elif group in GROUPS:
        choices = {option.name: option for option in options(group, config_dir)}
        if group == "sparsity":  # any ratio is an option
            if name not in ("", "dense"):
                Pattern.parse(name)
        elif equals and name not in (known := {each or "default" for each in choices}):
            raise ConfigError(option_line(group, name, known))
        if name in choices:
            yield from _option(choices[name])
        else:
            yield from _option(choices[""]) if "" in choices else _list(choices.values())
    else:
        above = topic.rpartition(".")[0].partition(".")[0]
        if above in ("", *GROUPS) and (meanings := key_meanings(topic, options(above, config_dir))):
            yield topic
            for key, defaults in meanings.items():
                yield from _key(key, defaults)
            return
        every = [option for each in GROUPS for option in options(each, config_dir)]
        if named := [option for option in every if option.name == topic]:
            for option in named:
                yield from _option(option)
        elif topic in experiment.names():
            yield from _experiment(topic)


def _experiment(name: str) -> Iterator[str]:
    found = experiment.load(name)
    yield f"experiment={name}"
    for text in (found.title, found.source, found.note):
        yield from _wrap(text, "  ", "  ")
    for scale, words in found.scales.items():
        yield from _wrap(f"scale={scale}: {words}", "  ", "    ")


def _hint(topic: str, others: Iterable[str]) -> str:
    if how := written(topic):
        return f"; {how}"
    keys = [key.name for group in ("", *GROUPS) for option in options(group) for key in option.keys]
    names = [name for group in GROUPS for name in kinds.names(group)]
    return did_you_mean(topic, [*keys, *GROUPS, *WORDS, *others, *names])


def _list(among: Collection[Option]) -> Iterator[str]:
    """A group's options, a paragraph each; advice comes before the recipes."""
    if "recipe" in {option.group for option in among}:
        yield from _wrap(_without_links(BEGIN_WITH), "", "")
        yield "By what you train:"
        for task, recipes in ADVICE:
            yield from _wrap(f"{task}: {_without_links(recipes)}.", "  ", "    ")
        yield ""
    for option in among:
        yield from _wrap(f"{option.group}={option.name}: {option.about} {option.use}", "", "    ")


def _option(option: Option) -> Iterator[str]:
    yield option.group + (f"={option.name}" if option.name else "")
    for paragraph in filter(None, (option.use, *(option.more or option.about).split("\n\n"))):
        if re.search(r"^(?:    |- )", paragraph, re.M):  # a formula or a list stays as it is
            yield from textwrap.indent(_without_marks(paragraph), "  ").splitlines()
        else:
            yield from _wrap(paragraph, "  ", "  ")
    for key in option.keys:
        yield key.name
        yield from _key(key, {key.default: []})


def _key(key: Key, defaults: dict[str, list[str]]) -> Iterator[str]:
    """The text on one meaning of a key. ``defaults`` has the options with this meaning by their
    default."""
    names = [name for owners in defaults.values() for name in owners if name]
    whose = f"of {', '.join(names)}: " if names else ""
    yield from _wrap(whose + key.meaning, "  ", "  ")
    one = len(defaults) == 1
    texts = (value if one else f"{value} ({', '.join(of)})" for value, of in defaults.items())
    takes = f"takes {key.takes}; " if key.takes else ""
    yield from _wrap(f"{takes}default {'; '.join(texts)}", "    ", "    ")


def _wrap(text: str, first: str, other: str) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    return textwrap.wrap(
        _without_marks(text), width, initial_indent=first, subsequent_indent=other,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _without_links(text: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)


def _without_marks(text: str) -> str:
    """A text without the marks of reStructuredText."""
    text = re.sub(r"::$", ":", text, flags=re.M)
    return re.sub(r":\w+:(?=`)|`+~?", "", text)


# --- nmrun --help ---------------------------------------------------------------------------------

OVERVIEW = """\
nmrun trains networks with N:M sparse weights and compares the recipes that do it.

usage: nmrun [group=option ...] [key=value ...]      one run
       nmrun -m [group=a,b ...] [key=x,y ...]        a sweep; run again, it does only what is missing
       nmrun -m key=x,y other=u,v zip=key,other      values that go together
       nmrun status|table|plot|report|compare|rerun ...             verbs for runs, each with --help
       nmrun tune|prune|export|sample|predict|ratios|bench|prepare|doctor ...      other verbs
       nmrun help KEY|GROUP|GROUP=OPTION|VERB        what it means, takes, and is by default

== Groups and their options ==
{groups}
sparsity takes any N:M with 1 <= N <= M, such as 3:16.

== Examples ==
nmrun recipe=step sparsity=2:8 trainer.epochs=120
nmrun recipe=sr_ste recipe.decay=1e-4 sparsity=1:16 optimizer=adamw trainer.epochs=20 seed=3
nmrun -m recipe=dense,asp,step sparsity=2:4,1:8 seed=0,1,2
nmrun table outputs/digits

Full key list with values: nmrun --cfg job     Shell completion: eval "$(nmrun -sc install=bash)"
"""


def overview(config_dir: str | None = None) -> str:
    """What ``nmrun --help`` prints, with the options of each group; those of the user's folder too."""
    groups = (f"{group}: {', '.join(names)}\n" for group, names in _options_by_group(config_dir))
    return OVERVIEW.format(groups="".join(groups)).rstrip("\n")


def _options_by_group(config_dir: str | None) -> Iterator[tuple[str, list[str]]]:
    by_group = {group: set(kinds.names(group)) for group in kinds.GROUPS}
    for folder in (place for place in files("nmrun.conf").iterdir() if place.is_dir()):
        names = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
        by_group.setdefault(folder.name, set()).update(name.removesuffix(".yaml") for name in names)
    for group, paths in kinds.in_folder(config_dir).items():
        by_group.setdefault(group, set()).update(file.stem for file in paths)
    for group in sorted(by_group):
        if by_group[group] and group != "hydra":
            yield group, sorted(by_group[group])
