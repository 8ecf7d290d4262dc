"""What counts as the source of one's own class: what its results depend on, and nothing else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from nmrun.lab.config import sources

FILES = {
    "mine.py": (
        "import math\nfrom others.scores import score\nfrom others.base import Base\n\n"
        "FACTOR = 2\n\ndef scaled(w):\n    return FACTOR * math.sqrt(w)\n\n"
        'class Mine(Base):\n    """Of mine."""\n\n    decay: float = 0.5\n\n'
        "    def choose(self, w):\n        return score(scaled(w))\n\n"
        "class Other:\n    decay = 1\n"
    ),
    "others/__init__.py": "raise SystemExit('nothing here is to be imported')\n",
    "others/base.py": "from . import tools\n\nclass Base:\n    start = tools.START\n",
    "others/scores.py": "from .tools import absolute as size\n\ndef score(w):\n    return size(w)\n",
    "others/tools.py": "START = 0\n\ndef absolute(w):\n    return abs(w)\n",
    "others/unused.py": "VALUE = 1\n",
}


def source(
    folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, path: str = "mine.Mine"
) -> str:
    """Of the class in these files, as a new process sees it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_read", {})
        patch.syspath_prepend(folder)
        patch.chdir(folder)
        return sources.source(path)


@pytest.mark.parametrize(
    ("file", "old", "new", "same"),
    [
        ("mine.py", "FACTOR * math.sqrt(w)", "FACTOR  *  math.sqrt(w)  # a remark", True),
        ("mine.py", "Of mine.", "Of mine, told in other words.", True),
        ("mine.py", "    decay = 1", "    decay = 2", True),
        ("mine.py", "class Other", "print(1)\n\nclass Another", True),
        ("others/unused.py", "1", "2", True),
        ("mine.py", "= 0.5", "= 0.6", False),
        ("mine.py", "FACTOR = 2", "FACTOR = 3", False),
        ("mine.py", "FACTOR * math", "FACTOR + math", False),
        ("mine.py", "class Other", "Mine.decay = 0.6\n\nclass Other", False),
        ("others/scores.py", "return size", "return -size", False),
        ("others/tools.py", "abs(w)", "w", False),
        ("others/tools.py", "START = 0", "START = 1", False),
    ],
)
def test_what_the_class_depends_on_counts(file, old, new, same, tmp_path, monkeypatch):
    edited = {**FILES, file: FILES[file].replace(old, new)}
    assert edited != FILES
    before = source(tmp_path / "a", FILES, monkeypatch)
    assert len(before) == 10
    assert (source(tmp_path / "b", edited, monkeypatch) == before) is same


def test_installed_packages_have_versions_instead(tmp_path, monkeypatch):
    assert source(tmp_path / "site-packages", FILES, monkeypatch) == ""
    for path in ("torch.nn.Linear", "json.loads", "nmrun.recipes.ste.STE", "nowhere.Mine"):
        assert source(tmp_path, {}, monkeypatch, path) == ""


def test_an_edit_counts_once_the_module_is_loaded_again(tmp_path, monkeypatch):
    """Python goes on with the class that it has imported, and so does the source."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the edits come within a second
    file = tmp_path / "read_once.py"
    file.write_text("class Mine:\n    decay = 1\n")
    first = sources.source("read_once.Mine")
    module = importlib.import_module("read_once")
    assert sources.source("read_once.Mine") == first
    file.write_text("class Mine:\n    decay = 22\n")
    assert (module.Mine.decay, sources.source("read_once.Mine")) == (1, first)
    importlib.reload(module)
    assert module.Mine.decay == 22
    assert sources.source("read_once.Mine") != first
    monkeypatch.delitem(sys.modules, "read_once")


def test_in_a_notebook_the_last_definitions_count(monkeypatch):
    def of(*cells: str) -> str:
        monkeypatch.setattr(sys.modules["__main__"], "In", ["", *cells], raising=False)
        return sources.source("__main__.Mine")

    helper, mine = (
        "def f(x):\n    return x",
        "class Mine:\n    def rule(self):\n        return f(1)",
    )
    first = of(helper, mine)
    assert first
    assert of(helper, "%matplotlib inline", mine, "Mine().rule()", mine) == first
    assert of(helper, mine, "def f(x):\n    return 2 * x") != first
    assert of(helper, mine, mine.replace("f(1)", "f(2)")) != first
    assert of(helper) == ""
