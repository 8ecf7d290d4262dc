"""The text of ``nmrun --help``, made without Hydra, which takes several times as long."""

from __future__ import annotations

import string
from collections.abc import Iterator
from importlib.resources import files

import yaml

from nmrun.lab.keys import options


def text(config_dir: str | None = None) -> str:
    """The template of ``conf/nmrun.yaml``, filled in as Hydra does it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    config = yaml.load((files("nmrun.conf") / "nmrun.yaml").read_text(encoding="utf-8"), loader)
    parts = config["hydra"]["help"]
    template = parts["template"]
    for name in ("header", "footer"):
        template = template.replace(f"${{hydra.help.{name}}}", parts[name])
    groups = "".join(f"{group}: {', '.join(names)}\n" for group, names in _groups(config_dir))
    return string.Template(template).substitute(APP_CONFIG_GROUPS=groups)


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
