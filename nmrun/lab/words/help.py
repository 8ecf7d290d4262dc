"""The text of ``nmrun --help``, made without Hydra, which takes several times as long."""

from __future__ import annotations

import string
from collections.abc import Iterator
from importlib.resources import files

import yaml

from nmrun.patterns import USUAL
from nmrun.recipes import RECIPES, installed


def text() -> str:
    """Fill the template of ``conf/nmrun.yaml`` as Hydra does."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    config = yaml.load((files("nmrun.conf") / "nmrun.yaml").read_text(encoding="utf-8"), loader)
    parts = config["hydra"]["help"]
    template = parts["template"]
    for name in ("header", "footer"):
        template = template.replace(f"${{hydra.help.{name}}}", parts[name])
    groups = "".join(f"{group}: {', '.join(options)}\n" for group, options in _groups())
    return string.Template(template).substitute(APP_CONFIG_GROUPS=groups)


def _groups() -> Iterator[tuple[str, list[str]]]:
    """Yield each group with its options, in the order of names."""
    beside = {"sparsity": USUAL, "recipe": (*RECIPES, *installed())}  # options without a file
    for folder in sorted(files("nmrun.conf").iterdir(), key=lambda folder: folder.name):
        if folder.is_dir():
            names = {file.name for file in folder.iterdir() if file.name.endswith(".yaml")}
            options = {name.removesuffix(".yaml") for name in names} | {
                *beside.get(folder.name, ())
            }
            if options:
                yield folder.name, sorted(options)
