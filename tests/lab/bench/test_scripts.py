"""What the scripts in ``benchmarks/`` time is what they say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nmrun.fast.cpu.kernels import products
from nmrun.lab.bench import harness, infer
from nmrun.patterns import Pattern
from nmrun.sparsity import hard_threshold

CPU = torch.device("cpu")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module


@pytest.mark.parametrize("ratio", ["2:4", "1:16", "8:32", "4:4"])
def test_each_way_finds_the_same_masks(script, ratio):
    torch.manual_seed(0)
    weight, pattern = torch.randn(5, 64), Pattern.parse(ratio)
    for name, way in script("masks").WAYS.items():
        out = torch.full_like(weight, 7.0)
        way(weight, out, pattern)
        expected = weight if name == "copy" else hard_threshold(weight, pattern)
        assert torch.equal(out, expected), name


@pytest.mark.parametrize("recipe", ["asp", "sr_ste", "step"])
def test_an_update_is_the_same_in_one_pass_and_apart(script, recipe):
    step = script("updates").step
    weights: list[Tensor] = []
    for in_one_pass in (True, False):
        take = step(recipe, 1, CPU, in_one_pass)
        take()
        take()
        weights += take.__self__.param_groups[0]["params"]
    # rounded apart, numbers of nearly one size may change places
    assert float((~torch.isclose(*weights)).float().mean()) < 1e-4
    assert int((weights[0].reshape(-1, 4) != 0).sum(1).max()) == 2


@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")
@pytest.mark.parametrize(
    ("name", "past", "vocabulary", "layers"),
    [
        ("gpt2", 5, 50257, 9),  # four a block, and the tied head
        ("gpt2", None, 50257, 9),
        # seven a block, and the head
        pytest.param("llama_7b_block", 5, 32000, 15, marks=pytest.mark.slow),
        pytest.param("llama_7b_block", None, 32000, 15, marks=pytest.mark.slow),
    ],
)
def test_a_small_language_model(script, name, past, vocabulary, layers, monkeypatch):
    pytest.importorskip("transformers")
    module = script("language_inference")
    monkeypatch.setitem(module.SIZES, name, (2, 32, 2))
    torch.manual_seed(0)
    model = module.Decoder(name, past).eval()
    x = torch.randint(32000, (1, 5) if past is None else (5, 1))
    with torch.no_grad():
        output = model(x)
        assert output.shape == (len(x), 1, vocabulary)
        whole = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(whole(x), output)
        model.model.set_attn_implementation("sdpa")  # with a mask
        torch.testing.assert_close(model(x), output)
    case = infer.case(name, (1, 5), model, x, [("float32", "packed", "1:4")])
    rows: list[harness.Row] = []
    harness.measure(case, 2, harness.Clock(CPU), rows)
    infer.compared(rows)
    assert [row["arm"] for row in rows] == ["torch", "packed"]
    assert not any("wrong" in row for row in rows)
    assert rows[-1]["layers"].endswith(f"of {layers}")
