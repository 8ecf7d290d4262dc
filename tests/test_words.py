"""Public things say what they take and give, and a file holds one idea."""

import ast
from collections.abc import Iterator
from pathlib import Path

import nmrun

ROOT = Path(nmrun.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "conf" not in path.relative_to(ROOT).parts)
LINES = 300  # of a file
SHORT = 5  # lines of a body that says itself what it does
# where two parameters or more are listed
LISTED = (
    *("api", "attach", "bench", "config", "data", "export", "files", "handle", "hooks", "models"),
    *("oneshot", "optim", "recipes", "report", "settings", "sparsity", "tasks", "train"),
)
TORCHS = ("forward", "backward")  # the class says what goes in and comes out

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parameters(function: Function) -> list[str]:
    given = function.args
    names = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [name.arg for name in names if name is not None and name.arg not in ("self", "cls")]


def body_lines(function: Function) -> int:
    statements = function.body[ast.get_docstring(function) is not None :]
    return (statements[-1].end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def methods(kind: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in kind.body if isinstance(node, Function)}


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
CLASSES = [n for tree in TREES.values() for n in tree.body if isinstance(n, ast.ClassDef)]


def inherited(kind: ast.ClassDef) -> set[str]:
    """The methods of nmrun's own base classes, whose words hold for those that override them."""
    bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in kind.bases]
    own = [base for base in CLASSES if base.name in bases and base.name != kind.name]
    return {name for base in own for name in {*methods(base), *inherited(base)}}


def unsaid(tree: ast.Module, listed: bool) -> Iterator[str]:
    """What lacks words in a file."""

    def lacks(function: Function, name: str, words: str | None) -> Iterator[str]:
        given = parameters(function)
        if given and body_lines(function) > SHORT and words is None:
            yield f"{name}: no docstring"
        elif listed and len(given) > 1 and body_lines(function) > SHORT:
            # that of a data set is said once for all of them
            said = ("Args:", "Attributes:", "as :func:`nmrun.tasks.build` says")
            if not any(each in (words or "") for each in said):
                yield f"{name}: no Args for {', '.join(given)}"

    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield from lacks(node, node.name, ast.get_docstring(node))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            if (about := ast.get_docstring(node)) is None:
                yield f"{node.name}: no docstring"
            for name, method in methods(node).items():
                if name == "__init__":
                    yield from lacks(method, node.name, about)
                elif not name.startswith("_") and name not in {*inherited(node), *TORCHS}:
                    yield from lacks(method, f"{node.name}.{name}", ast.get_docstring(method))


def test_public_things_have_words() -> None:
    found = {}
    for path, tree in TREES.items():
        place = path.relative_to(ROOT)
        listed = place.parts[0].removesuffix(".py") in LISTED
        found[place.as_posix()] = list(unsaid(tree, listed))
    assert {place: lacks for place, lacks in found.items() if lacks} == {}


def test_missing_words_are_found() -> None:
    code = """
def long(a, b):
    "Words."
    a = b
    b = a
    a = b
    b = a
    a = b
    return a
class Kind:
    def __init__(self, a, b):
        self.a = a
        self.b = b
        self.c = a
        self.d = b
        self.e = a
        self.f = b
    def method(self, a):
        a = 1
        b = 1
        c = 1
        d = 1
        e = 1
        return a
"""
    wanted = ["long: no Args for a, b", "Kind: no docstring", "Kind: no docstring"]
    assert list(unsaid(ast.parse(code), True)) == [*wanted, "Kind.method: no docstring"]
    assert list(unsaid(ast.parse(code), False)) == [*wanted[1:], "Kind.method: no docstring"]


def test_a_file_fits_a_short_sitting() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".c")]
    lines = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: count for path, count in lines.items() if count > LINES} == {}
