"""The text of ``nmrun --help``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from nmrun.lab.keys import options

TEXT = """\
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


def text(config_dir: str | None = None) -> str:
    """The help, with the options of each group; those of the user's folder too."""
    groups = (f"{group}: {', '.join(names)}\n" for group, names in _groups(config_dir))
    return TEXT.format(groups="".join(groups)).rstrip("\n")


def _groups(config_dir: str | None) -> Iterator[tuple[str, list[str]]]:
    by_group = {group: set(options.names(group)) for group in options.GROUPS}
    for folder in (place for place in files("nmrun.conf").iterdir() if place.is_dir()):
        names = [file.name for file in folder.iterdir() if file.name.endswith(".yaml")]
        by_group.setdefault(folder.name, set()).update(name.removesuffix(".yaml") for name in names)
    for group, paths in options.in_folder(config_dir).items():
        by_group.setdefault(group, set()).update(file.stem for file in paths)
    for group in sorted(by_group):
        if by_group[group] and group != "hydra":
            yield group, sorted(by_group[group])
