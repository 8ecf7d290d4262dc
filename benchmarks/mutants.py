"""Do the tests notice when the code is wrong? Sampled mutants of masks, recipes, checkpoints and
statistics, each against the tests of its group.

``python benchmarks/mutants.py [--sample 40] [--seed 0] [GROUP ...]`` takes so many
places of each group, with one of cosmic-ray's mutations at each, runs the group's tests in a copy
of the checkout, and lists the mutants that survive. torch is imported once: every mutant has a
forked process, which a timeout ends as killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
NEAREST = 6  # files of tests that a mutant has to survive
SHARED = ("torch", "scipy.stats", "pandas", "hydra", "safetensors.torch", "sklearn.datasets")
# modules, and the tests of them
GROUPS = {
    "masks": (
        "patterns.py sparsity/masks.py sparsity/transposable.py"
        " sparsity/reference.py recipes/parameters.py",
        "sparsity/test_patterns.py sparsity/test_masks.py sparsity/test_estimators.py"
        " recipes/test_progressive.py recipes/test_candidates.py recipes/test_held.py sparsity/test_pad.py",
    ),
    "recipes": (
        "recipes/[a-z]*.py",
        "recipes/test_*.py sparsity/test_conformance.py test_resume_state.py",
    ),
    "checkpoint": (
        "lab/train/checkpoint.py",
        "lab/train/test_checkpoint.py lab/train/test_shards.py"
        " lab/train/test_faults.py::test_no_flipped_bit_goes_unnoticed"
        " lab/train/test_resume.py::test_killed_again_and_again"
        " lab/train/test_resume.py::test_random_state_of_all_generators",
    ),
    "statistics": (
        "lab/compare/statistics.py lab/compare/notation.py",
        "lab/compare/test_numbers.py lab/compare/test_statistics.py",
    ),
}


class Mutant(NamedTuple):
    """A module's path, its first line that differs, that line before and after, the whole text."""

    path: Path
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n    - {self.before}\n    + {self.after}"


def mutants(path: Path, chance: random.Random) -> Iterator[Mutant]:
    """The mutants of a module, at each place one of those that are possible there. What changes
    annotations alone is none, as nothing evaluates those.
    """
    source = (ROOT / path).read_text()
    meant = _meaning(source)
    places: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():
            continue
        nodes = (node for node in ast_nodes(get_ast(source)))
        found = (start for node in nodes for start, _ in operator().mutation_positions(node))
        for number, start in enumerate(found):
            places.setdefault(start, []).append((name, number))
    for _, possible in sorted(places.items()):
        name, number = chance.choice(possible)
        text = mutate_code(source, get_operator(name)(), number)
        with contextlib.suppress(SyntaxError):  # `not x := 1`
            if text is None or _meaning(text) == meant:
                continue
            yield _mutant(path, source, text)


def _mutant(path: Path, source: str, text: str) -> Mutant:
    pairs = zip(source.splitlines(), text.splitlines(), strict=False)
    line, (before, after) = next((i, p) for i, p in enumerate(pairs, 1) if p[0] != p[1])
    return Mutant(path, line, before.strip(), after.strip(), text)


def _meaning(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def passes(copy: Path, tests: list[str], timeout: float) -> bool:
    """Whether the tests pass in a copy of the checkout, in a forked process."""
    _said(copy).unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        for stream, place in enumerate([Path(os.devnull), _said(copy), _said(copy)]):
            os.dup2(os.open(place, os.O_RDWR | os.O_CREAT | os.O_APPEND), stream)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(copy)]
        status = 1
        try:
            status = int(pytest.main(["-x", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)
    ends = time.monotonic() + timeout
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _said(copy: Path) -> Path:
    """What the last tests printed."""
    return copy.parent / "said"


def nearest_first(copy: Path, tests: list[str], module: Path) -> list[str]:
    """The tests' files, those first that are called like the module or name it in the largest share
    of their lines, as the first failure ends a mutant; ``NEAREST`` of them.
    """

    def share(name: str) -> float:
        path = copy / name.partition("::")[0]
        lines = path.read_text().splitlines()
        called = path.stem == f"test_{module.stem}"
        return called + sum(module.stem in line for line in lines) / len(lines)

    return sorted(tests, key=share, reverse=True)[:NEAREST]


def survivors(copy: Path, group: str, sample: int, seed: int) -> tuple[int, list[Mutant], str]:
    """Try a sample of a group's mutants.

    Returns:
        How many were tried, those that survived, and a line for the table.
    """
    modules, files = GROUPS[group]
    chance = random.Random(f"{seed} {group}")
    found = (path for name in modules.split() for path in sorted(ROOT.glob(f"nmrun/{name}")))
    every = [mutant for path in found for mutant in mutants(path.relative_to(ROOT), chance)]
    tried = sorted(chance.sample(every, min(sample, len(every))))
    tests = []
    for name in files.split():
        path, some, test = name.partition("::")
        there = sorted(str(found.relative_to(copy)) for found in copy.glob(f"tests/{path}"))
        tests += [f"{found}{some}{test}" for found in there]
    began = time.monotonic()
    if not passes(copy, tests, 3600):
        said = _said(copy).read_text()
        sys.exit(f"{said[-2000:]}the tests of {group} fail without any mutation: {' '.join(tests)}")
    timeout = 60 + 5 * (time.monotonic() - began)
    survived = []
    for number, mutant in enumerate(tried, 1):
        place = copy / mutant.path
        original = place.read_text()
        place.write_text(mutant.text)
        if passes(copy, nearest_first(copy, tests, mutant.path), timeout):
            survived.append(mutant)
            print(f"survived: {mutant}", flush=True)
        place.write_text(original)
        print(f"{group} {number} of {len(tried)}, {len(survived)} survived", flush=True)
    killed = len(tried) - len(survived)
    row = f"| {group} | {len(every)} | {len(tried)} | {killed} | {killed / len(tried):.0%} |"
    return len(tried), survived, row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each group")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    options = parser.parse_args()
    for name in SHARED:
        importlib.import_module(name)
    rows, left, tried = list[str](), list[Mutant](), 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        files = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        for name in files:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, copy / name)
        if not (copy / "nmrun" / "conf").exists():
            (copy / "nmrun" / "conf").symlink_to("../conf")
        for group in options.groups or GROUPS:
            count, survived, row = survivors(copy, group, options.sample, options.seed)
            tried, left, rows = tried + count, left + survived, [*rows, row]
    command = shlex.join(["python", "benchmarks/mutants.py", *sys.argv[1:]])
    head = "| group | mutants | sampled | killed | share |\n|---|---|---|---|---|"
    total = f"{tried - len(left)} of {tried} sampled mutants killed, by `{command}`"
    blocks = "\n\n".join(f"    {mutant}".replace("\n", "\n    ") for mutant in left)
    page = "\n".join([total, "", head, *rows, "", "Survivors:", "", blocks or "    none", ""])
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
