"""What CONTRIBUTING.md says a new recipe, key, data set, metric or column takes is all that it takes:
each is added to a copy of the package, which then has it in runs, help, checks and tables.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from verbs import python

import nmrun

pytestmark = pytest.mark.slow
SMALL = ("trainer.limit_batches=4", "trainer.epochs=1", "trainer.threads=1", "track=local")
HINGE = '''"""Hinge-STE: a recipe of this test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.ranges import number
from nmrun.recipes.base import Recipe
from nmrun.rule import Rule
from nmrun.sparsity.weight import SparseWeight


@dataclass
class HingeSTE(Recipe):
    """STE with a part of the pruned weights' gradient.

    When to use: here.

    Args:
        share: the part.
    """

    name: ClassVar[str] = "hinge_ste"
    title: ClassVar[str] = "Hinge-STE"
    masks_are_largest: ClassVar[bool] = True

    share: Annotated[float, number(0, 1)] = 0.5

    def rule(self, weight: SparseWeight) -> Rule:
        return Rule(pruned_gradient_factor=self.share)
'''
NOISE = """    gradient_noise: Annotated[
        float, number(0), "deviation of normal noise that is added to each gradient"
    ] = 0.0
"""
ADDED = """        if self.trainer.gradient_noise:
            for p in model.parameters():
                p.grad += self.trainer.gradient_noise * torch.randn_like(p.grad)
"""
STRIPES = '''

@dataclass(frozen=True)
class Stripes(Seeded, Dataset):
    """Stripes in two directions."""

    builder: ClassVar[str] = "nmrun.lab.tasks.vision.stripes.stripes"

    side: Annotated[int, whole(4), "pixels of a side"] = 8
'''
BUILT = '''"""Stripes."""

import torch

from nmrun.lab.tasks.vision import Classification


def stripes(config, device):
    side = config.dataset.side
    line = torch.arange(side).expand(side, side) % 2 * 255
    images = torch.stack([line, line.T]).repeat(200, 1, 1).unsqueeze(1).to(torch.uint8)
    labels = torch.arange(2).repeat(200)
    splits = dict.fromkeys(("train", "val", "test"), (images, labels))
    return Classification.of(config, splits, 2, device)
'''


class House:
    """A copy of the package, and commands in a folder beside it."""

    def __init__(self, folder: Path) -> None:
        self.code, self.folder = folder / "code" / "nmrun", folder
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(nmrun.__file__).parent, self.code, ignore=left_out)

    def insert(self, file: str, before: str, text: str) -> None:
        path = self.code / file
        old = path.read_text()
        assert old.count(before) == 1, (file, before)
        path.write_text(old.replace(before, text + before))

    def nmrun(self, *words: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "nmrun", *words, cwd=self.folder, PYTHONPATH=str(self.code.parent))

    def result(self, *words: str) -> dict[str, Any]:
        """The result of one small run."""
        ran = self.nmrun(*SMALL, *words)
        assert ran.returncode == 0, ran.stderr
        result: dict[str, Any] = json.loads((self._last() / "result.json").read_text())
        return result

    def _last(self) -> Path:
        files = self.folder.glob("outputs/*/*/*/*/*/result.json")
        return max(files, key=lambda file: file.stat().st_mtime).parent


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_a_recipe_is_a_file_and_a_line(house: House):
    (house.code / "recipes" / "hinge.py").write_text(HINGE)
    line = '    "hinge_ste": "nmrun.recipes.hinge.HingeSTE",\n'
    house.insert("recipes/__init__.py", '    "step": "nmrun.recipes.step.STEP",\n', line)
    result = house.result("recipe=hinge_ste", "sparsity=4:2:8", "model=mlp", "trainer.epochs=2")
    assert result["config"]["recipe"] == {"name": "hinge_ste", "share": 0.5}
    layers = result["sparsity"]["layers"]
    assert layers
    assert all(layer["holds"] for layer in layers)
    house.result("recipe=dense", "model=mlp", "trainer.epochs=2")
    assert "Hinge-STE" in house.nmrun("table", "outputs", "--format", "latex").stdout
    assert "part" in house.nmrun("help", "recipe.share").stdout
    wrong = house.nmrun("recipe=hinge_ste", "recipe.share=2")
    assert (wrong.returncode, "recipe.share=2" in wrong.stderr) == (2, True)
    measured = house.nmrun(
        "bench", "train", "--arms", "hinge_ste", "--rounds", "1", "--steps", "1",
        "trainer.threads=1",
    )  # fmt: skip
    assert "hinge_ste" in measured.stdout, measured.stderr


def test_a_key_of_the_trainer_is_a_field_and_its_use(house: House):
    before = house.result("recipe=ste")
    house.insert("lab/keys/groups.py", "    label_smoothing: Annotated[\n", NOISE)
    house.insert("lab/train/steps.py", "        factor = self.lr_factor(self.updates)\n", ADDED)
    told = house.nmrun(*SMALL, "recipe=ste")
    assert told.stdout.count("finished already") == 1, told.stdout + told.stderr
    noisy = house.result("recipe=ste", "trainer.gradient_noise=0.1")
    assert noisy["id"] != before["id"]
    assert noisy["metrics"] != before["metrics"]
    again = house.result("recipe=ste", "force=true")
    assert (again["id"], again["metrics"]) == (before["id"], before["metrics"])
    assert "normal noise" in house.nmrun("help", "trainer.gradient_noise").stdout
    wrong = house.nmrun("trainer.gradient_noise=-1")
    assert (wrong.returncode, "trainer.gradient_noise=-1" in wrong.stderr) == (2, True)


def test_a_data_set_is_a_class_of_keys_and_what_builds_it(house: House):
    (house.code / "lab" / "tasks" / "vision" / "stripes.py").write_text(BUILT)
    house.insert("lab/keys/datasets.py", "\n\nMODELS_OWN =", STRIPES)
    line = '        "stripes": "datasets.Stripes",\n'
    house.insert("lab/keys/options.py", '        "stdlib_text": "datasets.StdlibText",\n', line)
    result = house.result("dataset=stripes", "dataset.side=12", "recipe=sr_ste", "sparsity=2:4")
    assert result["signature"]["input"]["shape"] == [1, 12, 12]
    assert "pixels of a side" in house.nmrun("help", "dataset=stripes").stdout
    wrong = house.nmrun("dataset=stripes", "dataset.side=1")
    assert (wrong.returncode, "dataset.side=1" in wrong.stderr) == (2, True)
    assert "stripes" in house.nmrun("--help").stdout


def test_a_metric_is_what_an_evaluation_returns(house: House):
    place = "lab/tasks/vision/classification.py"
    seen = "                right += (logits.argmax(1) == labels).sum()\n"
    counted = "                near += (logits.topk(3).indices == labels[:, None]).sum()\n"
    house.insert(place, seen, counted)
    begun = "        for _, (images, labels), counts in self._evaluation(split"
    house.insert(place, begun, "        near = torch.zeros((), dtype=torch.int64, device=device)\n")
    path = house.code / place
    text = path.read_text()
    for old, new in (
        ('"count": count}', '"count": count, "near": int(near)}'),
        ('"accuracy": right / count}', '"accuracy": right / count, "top3": near / count}'),
        ("loss, right, count = (", "loss, right, count, near = ("),
        ('("loss", "right", "count")', '("loss", "right", "count", "near")'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    final = house.result("recipe=ste")["metrics"]["final"]
    assert final["test/accuracy"] <= final["test/top3"] <= 1
    house.result("recipe=ste", "seed=1")
    table = house.nmrun("table", "outputs", "--metric", "test/top3", "--format", "json")
    assert "test/top3" in table.stdout, table.stderr


def test_a_column_of_tables_is_a_line(house: House):
    line = (
        'ROW_COLUMNS["most"] = lambda table, row: max(c.mean for c in table.cells_of(row)).hex()\n'
    )
    house.insert("lab/compare/tables.py", "\n\ndef build(\n", line)
    results = [house.result("recipe=ste", f"sparsity={ratio}") for ratio in ("2:4", "1:8")]
    most = max(result["metrics"]["final"]["test/accuracy"] for result in results).hex()
    for style in ("markdown", "latex", "csv", "json"):
        table = house.nmrun("table", "outputs", "--format", style).stdout
        assert "most" in table, table
        assert most in table
    assert house.nmrun("report", "outputs").returncode == 0
    page = (house.folder / "outputs" / "report.html").read_text()
    assert f"<td>{most}</td>" in page
    code = "import nmrun; print(*nmrun.table('outputs')['most'])"
    read = python("-c", code, cwd=house.folder, PYTHONPATH=str(house.code.parent))
    assert read.stdout.split() == [most, most]
