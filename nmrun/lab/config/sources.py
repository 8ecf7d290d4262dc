"""The source of the user's own classes and functions, which tells their versions apart.

A recipe, data set or model of one's own is a dotted path, ``saliency.Saliency``. Its source is that
class and everything that it uses, in its file and in other files of the user's. Comments,
docstrings and layout are no part of it; nor are calls that stand alone in a file. Packages in
``site-packages`` have versions instead. In a notebook the cells are the file.

A file counts with the text that the process imported or reloaded, as far as that is known.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from nmrun import registry
from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, Config

# groups that may have something of the user's own, and the key that names it
OWN = {
    **dict.fromkeys(("dataset", "model", "recipe"), "_target_"),
    **dict.fromkeys(("optimizer", "schedule"), "target"),
}
INSTALLED = {"site-packages", "dist-packages"}
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Definition = tuple[str, str]  # a module and a name in it; of ``*`` all names

_read: dict[str, tuple[object, list[ast.stmt]]] = {}  # by module, with the import that it is of


def targets(plain: Mapping[str, Any]) -> dict[str, str]:
    """By group, the dotted path of what a config uses from outside nmrun."""
    paths = {}
    for group, key in OWN.items():
        content = plain.get(group, {})
        name, path = str(content.get("name")), content.get(key)
        if path is None and name in options.points(group):
            path = options.kind(group, name).builder
        if path is not None and str(path).partition(".")[0] != "nmrun":
            paths[group] = str(path)
    return paths


def recorded(config: Config, before: Mapping[str, Any] | None = None) -> Config:
    """The config with a hash of the source of what is the user's own, as ``recipe._source_``. For a
    run that goes on from ``before`` it lists all sources so far: ``old+new``."""
    groups, earlier = {}, targets(before or {})
    for group, path in targets(config.plain).items():
        text = source(path)
        if before and earlier.get(group) == path and SOURCE in before[group]:
            first = before[group][SOURCE]
            text = first if _last(first) == text else f"{first}+{text}"
        if text:
            groups[group] = {**config.plain[group], SOURCE: text}
    return Config({**config.plain, **groups}, config.pattern)


def changed(before: Mapping[str, Any], config: Config) -> dict[str, str]:
    """By group, what has a different source in ``before``, the config of an earlier run."""
    earlier = targets(before)
    return {
        group: path
        for group, path in targets(config.plain).items()
        if earlier.get(group) == path and _last(before[group].get(SOURCE, "")) != source(path)
    }


def _last(sources: str) -> str:
    return sources.rpartition("+")[2]


def source(path: str) -> str:
    """A hash of ten hexadecimal digits; empty if nothing is the user's own."""
    module, _, name = path.rpartition(".")
    registry.see_current_folder()
    wanted, texts = [(module, name)], dict[Definition, str]()
    while wanted:
        definition = module, name = wanted.pop()
        if definition in texts:
            continue
        statements = [s for s in _statements(module) if name in ("*", *_defined(s))]
        texts[definition] = "\n".join(map(ast.unparse, statements))
        for statement in statements:
            wanted += _used(statement, module)
    every = "\n".join(texts[definition] for definition in sorted(texts))
    return hashlib.sha256(every.encode()).hexdigest()[:10] if every.strip() else ""


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module defines or changes."""
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            place: ast.expr = node
            stored = isinstance(node.ctx, ast.Store)
            while isinstance(place, ast.Attribute | ast.Subscript):  # Mine.beta = 0.9
                place = place.value
            if stored and isinstance(place, ast.Name):
                names.add(place.id)
    return names


def _used(statement: ast.stmt, module: str) -> Iterator[Definition]:
    """The names that a statement uses, in its module or in others."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield module, node.id
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "*"
        elif isinstance(node, ast.ImportFrom):
            other = node.module or ""
            if node.level:
                spec = _spec(module)
                parts = (spec.parent or "" if spec else "").split(".")
                above = parts[: len(parts) - node.level + 1]
                other = ".".join(filter(None, [*above, other]))
            for alias in node.names:
                yield other, alias.name
                yield f"{other}.{alias.name}", "*"  # where that is a module


def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module of the user's; none for any other module."""
    main = vars(sys.modules["__main__"])
    if module == "__main__" and "In" in main:
        return _of_cells(main["In"])
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None) or loaded  # another one where it is loaded again
    if spec is None:
        return _parsed(module)
    if module not in _read or _read[module][0] is not spec:
        _read[module] = spec, _parsed(module)
    return _read[module][1]


def _parsed(module: str) -> list[ast.stmt]:
    file = sys.modules[module].__file__ if module == "__main__" else None
    whole = Path(file) if file else _file(_spec(module.partition(".")[0]))
    path = Path(file) if file else _file(_spec(module))
    standard = whole.is_relative_to(sysconfig.get_path("stdlib"))
    if path.suffix != ".py" or INSTALLED & {*whole.parts} or standard:
        return []
    try:
        return _without_docstrings(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError):  # the import says what is wrong
        return []


def _spec(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its package, as ``importlib.util.find_spec``
    would."""
    above = module.rpartition(".")[0]
    if not above:
        with contextlib.suppress(ValueError):  # a module that was made by hand
            return None if module == "nmrun" else importlib.util.find_spec(module)
        return None
    package = _spec(above)
    places = package.submodule_search_locations if package else None
    return PathFinder.find_spec(module, places) if places else None


def _file(spec: ModuleSpec | None) -> Path:
    places = spec.submodule_search_locations if spec else None
    return Path((spec.origin if spec else None) or next(iter(places or ()), ""))


def _of_cells(cells: list[str]) -> list[ast.stmt]:
    """The statements of a notebook's cells that are in effect: the last one for each name."""
    last: dict[str, ast.stmt] = {}
    for cell in cells:
        try:
            tree = ast.parse(cell)
        except SyntaxError:
            continue
        last |= {name: each for each in _without_docstrings(tree) for name in _defined(each)}
    return list({id(statement): statement for statement in last.values()}.values())


def _without_docstrings(tree: ast.Module) -> list[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree.body
