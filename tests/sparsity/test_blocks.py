"""V:N:M patterns: masks by trying all choices, checks, which layers hold them, who refuses."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import one_line
from reference import largest_in_blocks
from runs import result_of
from torch import Tensor, nn
from training import by_sgd, train

import nmrun
from nmrun.fast import packed
from nmrun.lab.api.runs import Result
from nmrun.recipes import RECIPES
from nmrun.sparsity import check_nm, hard_threshold, nm_mask

TRAINED = ("ste", "sr_ste", "asp", "step", "ste_periodic", "sqft")


def weights(*shape: int) -> Tensor:
    """With ties, and sums that are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).mul(8).round() / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("v", "n", "m"), [(2, 2, 8), (4, 1, 6), (8, 4, 16), (16, 3, 5), (4, 2, 12)]
)
def test_the_mask_by_trying_all_choices(v, n, m, dtype):
    text, w = f"{v}:{n}:{m}", weights(16, 3 * m).to(dtype)
    expected = largest_in_blocks(w, text)
    assert torch.equal(nm_mask(w, text), expected)
    assert torch.equal(nm_mask(w.T, text, dim=0), expected.T)
    assert torch.equal(hard_threshold(w, text), torch.where(expected, w, 0))
    large = weights(64, 40 * m).to(dtype)  # where kernels would work
    assert torch.equal(nm_mask(large, text), largest_in_blocks(large, text))
    check_nm(hard_threshold(w, text), text)
    check_nm(hard_threshold(w, text), f"{n}:{m}")


def test_at_every_kernel_position_and_in_a_short_last_group():
    w = weights(8, 16, 3, 2)
    mask = nm_mask(w, "4:2:8")
    for y, x in itertools.product(range(3), range(2)):
        assert torch.equal(mask[:, :, y, x], largest_in_blocks(w[:, :, y, x], "4:2:8"))
    for inputs in (9, 10, 13, 15):
        w = weights(8, inputs)
        mask = nm_mask(w, "4:2:8", pad=True)
        assert torch.equal(mask, largest_in_blocks(w, "4:2:8"))


def test_a_check_looks_at_blocks():
    w = torch.zeros(4, 8)
    w[0, :2] = w[1, 2:4] = 1.0
    check_nm(w, "4:2:8")
    w[2, 7] = 1.0
    check_nm(w, "2:8")
    check_nm(w, "2:2:8")
    with one_line(ValueError, "4 outputs have non-zeros in more than 4 of 8 columns"):
        check_nm(w, "4:2:8")
    with pytest.raises(ValueError, match="more than 4 of 8 columns"):  # one block of two
        check_nm(torch.cat([w[:2], w[:2], w]), "4:2:8")
    check_nm(w.T, "2:2:8", dim=0)
    with pytest.raises(ValueError, match="more than 4 of 8 columns"):
        check_nm(w.T, "4:2:8", dim=0)
    with pytest.raises(ValueError, match="a multiple of 3 outputs; there are 4"):
        nm_mask(w, "3:2:8")


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)
        super().__init__(*layers)


def test_layers_that_cannot_hold_it_are_named():
    model = Net()
    _, handle = by_sgd(model, "ste", "4:2:8")
    assert [w.name for w in handle.sparse] == ["0.weight"]
    reasons = {left.name: left.reason for left in handle.left_dense}
    assert reasons["2.weight"] == "6 outputs are not a multiple of 4"
    assert "inputs are not a multiple of 8" in reasons["4.weight"]
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.randn(4, 8, 8))
    with pytest.raises(nmrun.errors.ConfigError, match="is for matrices and convolutions"):
        by_sgd(experts, "ste", "4:2:8", dims={"weight": 1})


@pytest.mark.parametrize(
    ("recipe", "fused"), [("sr_ste", True), ("asp", False), ("step", True), ("sqft", False)]
)
def test_a_training_resumes_with_the_same_bits(recipe, fused, kernels_for_small_weights):
    """With kernels for small weights, none of which may be taken."""

    def start():
        model = Net()
        optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
        overrides = {"2": "3:2:8", "4": "2:6"}
        handle = nmrun.sparsify(
            model, optimizer, recipe, "4:2:8", 8, overrides=overrides, exclude=None
        )
        return model, optimizer, handle

    whole, first = start(), start()
    train(*whole[:2], range(8))
    train(*first[:2], range(6))
    for weight, ratio in zip(first[2].sparse, ("4:2:8", "3:2:8", "1:2:6"), strict=True):
        mask = largest_in_blocks(weight.dense, ratio)
        assert torch.equal(weight.parameter, weight.dense * mask)
    again = start()
    again[0].load_state_dict(first[0].state_dict())
    again[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    train(*again[:2], range(6, 8))
    for a, b in zip(again[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(a, b)
    report = again[2].report()
    assert [layer["pattern"] for layer in report["layers"]] == ["4:2:8", "3:2:8", "2:6"]
    assert all(layer["holds"] for layer in report["layers"])
    again[2].finalize()
    check_nm(again[0], "4:2:8", overrides={"2": "3:2:8", "4": "2:6"}, exclude=None)


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        *((name, {}, f"{name} has masks of its own: 4:2:8 ones")
          for name in RECIPES if name not in (*TRAINED, "dense", "t_sr_ste")),
        ("t_sr_ste", {}, "a transposable mask is for N:M patterns, not for 4:2:8"),
        ("ste", {"input_gradient": "transposable"}, "a transposable mask is for N:M patterns"),
        ("asp", {"permute": True}, "permute=true is for N:M patterns, not for 4:2:8"),
        ("ste", {"mvue": "4:2:8"}, "mvue is for N:M patterns, not for 4:2:8"),
    ],
)  # fmt: skip
def test_who_refuses_it(recipe, options, message):
    model = Net()
    optimizer = nmrun.optim.AdamW(model.parameters())
    with one_line(ValueError, message):
        nmrun.sparsify(model, optimizer, recipe, "4:2:8", 10, exclude=None, **options)
    assert not optimizer.state


def used_elsewhere(run: Result, nmrun_cli: Any, root: Path) -> None:
    """Files for other tools hold the blocks, and packed layers compute with them as with N:M."""
    model = run.model()
    x = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(x)
    for form in ("safetensors", "packed", "onnx"):
        process = nmrun_cli("export", str(run.folder), "--out", f"to/{form}", "--format", form)
        assert process.returncode == 0, process.stderr
        assert "16:2:8" in process.stdout
    read = packed.load(root / "to" / "packed")
    assert read.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor)
    with torch.no_grad():
        loaded = nmrun.load_packed(root / "to" / "packed", copy.deepcopy(model))
        torch.testing.assert_close(loaded(x), expected, rtol=1e-4, atol=1e-5)
        nmrun.deploy(model, x)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    about = json.loads((root / "to" / "packed" / "sparsity.json").read_text())
    assert {layer["pattern"] for layer in about["layers"]} == {"16:2:8"}
    # pruned once more, to blocks of other rows, to rows alone
    for ratio, v in (("32:1:8", 32), ("1:8", 1)):
        process = nmrun_cli(
            "prune", str(run.folder), "method=wanda", f"sparsity={ratio}", "samples=8"
        )
        assert process.returncode == 0, process.stderr
        pruned = result_of(Path(root, process.stdout.split()[-1]))
        assert pruned["config"]["sparsity"]["v"] == v
        assert {layer["pattern"] for layer in pruned["sparsity"]["layers"]} == {ratio}


@pytest.mark.slow
def test_a_run(nmrun_cli, tmp_path):
    words = ("recipe=sr_ste", "model=mlp", "model.hidden=[32,32]", "debug=fast")
    process = nmrun_cli(*words, "sparsity=16:2:8")
    assert process.returncode == 0, process.stderr
    (folder,) = (tmp_path / "outputs/.debug").glob("*/mlp/sr_ste/16of2of8/*")
    result = result_of(folder)
    assert [result["config"]["sparsity"][key] for key in ("v", "n", "m")] == [16, 2, 8]
    assert result["sparsity"]["pattern"] == "16:2:8"
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    for verb, text in (("table", "16:2:8"), ("status", "1 finished"), ("report", "")):
        process = nmrun_cli(verb, "outputs/.debug")
        assert process.returncode == 0, process.stderr
        assert text in process.stdout
    run = Result("finished", result["config"], result["metrics"]["final"], folder)
    assert ["sparsity", "16:2:8"] in [line.split() for line in repr(run).splitlines()]
    used_elsewhere(run, nmrun_cli, tmp_path)
    process = nmrun_cli(*words, "sparsity=2:8", "sparsity.overrides={inner.0: 8:2:8}", "dry=true")
    assert re.search(r"inner.0.weight +32x32 +8:2:8", process.stdout), process.stderr
    for wrong, message in (
        (("sparsity=16:2:8", "recipe=s_ste"), "recipe=s_ste sparsity=16:2:8: V:N:M masks are for"),
        (("sparsity=7:2:8",), "32 outputs are not a multiple of 7"),
    ):
        process = nmrun_cli(*words, *wrong)
        assert process.returncode == 2, process.stderr
        (line,) = [line for line in process.stderr.splitlines() if re.search(message, line)]
        assert "Traceback" not in process.stderr
        assert message in line
