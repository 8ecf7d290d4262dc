"""The library stands by itself: what it loads, and the names that it holds in strings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nmrun

ROOT = Path(nmrun.__file__).parent
ABOVE = {"fast": ("nmrun.papers", "nmrun.lab"), "lab": ("nmrun.papers",)}
LIBRARIES = ("hydra", "omegaconf", "pandas", "matplotlib", "sklearn", "rich", "wandb")
BELOW = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in ("papers", "conf", "__init__.py", "__main__.py")
)


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh Python has after some code."""
    process = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print('\\n'.join(sys.modules))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(process.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import nmrun; nmrun.sparsify; nmrun.optim; nmrun.prune; nmrun.sparse_activations",
        "import nmrun; nmrun.accelerate; nmrun.deploy; nmrun.load_packed",
    ],
)
def test_the_library_loads_nothing_of_the_laboratory(code):
    modules = loaded_by(code)
    assert {name for name in modules if name.split(".")[0] in LIBRARIES} == set()
    assert {name for name in modules if name.startswith("nmrun.lab")} == set()


def strings(path: Path) -> list[str]:
    """Those of a file that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_no_name_in_a_string_points_up():
    """A dotted name that is imported later is an arrow too, and import-linter does not see it."""
    wrong = [
        f"{path}: {text}"
        for path in BELOW
        for text in strings(ROOT / path)
        if text.startswith(ABOVE.get(path.parts[0], ("nmrun.papers", "nmrun.lab", "nmrun.fast")))
    ]
    assert wrong == []
