"""Proof of N:M and plain weights: counted by brute force, loaded into models that know nothing of
sparsity.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import top
from runs import result_of, rewrite, write_run
from safetensors.torch import load_file
from torch import Tensor, nn
from training import bits
from verbs import verb

import nmrun
from nmrun.errors import RunError
from nmrun.lab.export.cli import export
from nmrun.lab.train.weights import Replicated
from nmrun.sparsity import check_nm
from nmrun.sparsity.check import layer_report

TOTAL = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "asp": {"prune_at": 0.5},
    "step": {"switch": 0.5},
    "maskllm": {"dense": 0.25},
}


def groups_of(weight: Tensor, m: int, dim: int) -> Iterator[tuple[list[int | slice], int]]:
    """Each group as an index, with the number of its non-zeros, one after the other."""
    dim = dim % weight.dim()
    steps = [m if axis == dim else 1 for axis in range(weight.dim())]
    for place in product(
        *(range(0, size, step) for size, step in zip(weight.shape, steps, strict=True))
    ):
        index: list[int | slice] = [*place]
        index[dim] = slice(place[dim], place[dim] + m)
        yield index, sum(value != 0 for value in weight[tuple(index)].tolist())


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(8, 8, 2),
        nn.BatchNorm2d(8),
        nn.Tanh(),
        nn.Conv2d(8, 16, 2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def trained(recipe: str, steps: int, **options: Any) -> tuple[nn.Sequential, nmrun.Handle]:
    model = net()
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.05)
    settings = {"exclude": None, **OPTIONS.get(recipe, {}), **options}
    handle = nmrun.sparsify(model, optimizer, recipe, "2:4", TOTAL, **settings)
    for _ in range(steps):
        model(torch.randn(4, 8, 3, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), handle


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["1:2", "2:4", "3:4", "1:8", "4:8"])
@pytest.mark.parametrize(
    ("shape", "dim"), [((8,), 0), ((3, 16), 1), ((16, 3), 0), ((2, 8, 3, 2), 1), ((2, 3, 8), -1)]
)
def test_a_tensor_holds_exactly_if_no_group_has_more(shape, dim, pattern):
    n, m = map(int, pattern.split(":"))
    generator, seen = torch.Generator().manual_seed(0), set()
    for density in (0.05, 0.1, 0.3, 0.5, 0.7, 1.0) * 6:
        weight = torch.randn(shape, generator=generator) * (
            torch.rand(shape, generator=generator) < density
        )
        counts = list(groups_of(weight, m, dim))
        wrong = [(index, count) for index, count in counts if count > n]
        seen.add(bool(wrong))
        report = layer_report("w", weight, nmrun.Pattern(n, m), dim)
        assert report["holds"] == (not wrong)
        assert report["nonzeros"] == sum(count for _, count in counts)
        if not wrong:
            assert check_nm(weight, pattern, dim) == ["tensor"]
            continue
        with pytest.raises(ValueError, match=f"^tensor is not {pattern}: ") as raised:
            check_nm(weight, pattern, dim)
        index, count = wrong[0]
        place = ", ".join(
            f"{i.start}-{i.stop - 1}" if isinstance(i, slice) else f"{i}" for i in index
        )
        assert f"{count} of {m} weights at [{place}] are non-zero" in str(raised.value)
    assert seen == {False, True}


def test_zeros_and_what_is_not_a_number():
    assert check_nm(torch.tensor([[0.0, -0.0, 1.0, -0.0]]), "1:4")
    for value in (torch.nan, torch.inf, 1e-45):
        with pytest.raises(ValueError, match="2 of 4 weights"):
            check_nm(torch.tensor([[0.0, value, 1.0, -0.0]]), "1:4")
    with pytest.raises(ValueError, match="1:4 needs dimension 1 to be a multiple of 4; it is 6"):
        check_nm(torch.zeros(4, 6), "1:4")
    with pytest.raises(ValueError, match="5:4 is not an N:M pattern"):
        check_nm(torch.zeros(4, 4), "5:4")


# --- models ---------------------------------------------------------------------------------------


def test_of_a_plain_model_every_weight_that_could_hold_is_checked():
    model = net()
    with torch.no_grad():
        model[0].weight[:, [0, 1, 4, 5]] = 0.0
        model[3].weight[:, :3] = 0.0
    for pattern, options, names in (
        ("2:4", {"exclude": "5"}, ["0.weight", "3.weight"]),
        ("2:4", {"include": ["0", "3"]}, ["0.weight", "3.weight"]),
        ("2:4", {"overrides": {"3": "1:4", "5": "dense"}}, ["0.weight", "3.weight"]),
        # 3 has four inputs
        ("2:8", {"overrides": {"0": "4:8", "5": "8:8"}}, ["0.weight", "5.weight"]),
    ):
        assert check_nm(model, pattern, **{"exclude": None, **options}) == names
    for pattern, options, message in (
        ("2:4", {}, r"^5.weight is not 2:4: 4 of 4 weights at \[0, 0-3\] are non-zero$"),
        ("2:4", {"overrides": {"0": "1:4", "5": "dense"}}, r"^0.weight is not 1:4"),
        ("1:64", {}, "no weight of this model could hold 1:64: nothing to check"),
        ("2:4", {"exclude": "head"}, "exclude: 'head' matches no layer"),
    ):
        with pytest.raises(ValueError, match=message):
            check_nm(model, pattern, **{"exclude": None, **options})


@pytest.mark.parametrize("steps", [0, 3, TOTAL])
@pytest.mark.parametrize(
    "recipe", ["sr_ste", "s_ste", "asp", "step", "bi_mask", "lbc", "maskllm", "mdgf_linear"]
)
def test_the_final_state_is_what_finalize_leaves_under_plain_names(recipe, steps):
    """In every phase, and the model trains on untouched. Without a step, or in an unfinished phase,
    finalize leaves nothing.
    """
    model, handle = trained(recipe, steps, exclude="5")
    before = bits(model.state_dict())
    plain, x = net(1).eval(), torch.randn(2, 8, 3, 3)
    final = Replicated(model, handle.optimizer, handle).final_state_dict()
    assert list(final) == sorted(plain.state_dict())
    for name in ("0.weight", "3.weight"):
        check_nm(final[name], "2:4")
        assert not final[name][final[name] == 0].signbit().any()
    left = bits(dict(final))
    plain.load_state_dict(final)
    if handle.is_sparse:
        assert torch.equal(plain(x), model(x))
        assert all(torch.equal(tensor, final[name]) for name, tensor in model.state_dict().items())
    for tensor in final.values():
        tensor.zero_()
    assert bits(model.state_dict()) == before
    if steps == 0 or not handle.is_sparse:
        message = "never stepped" if steps == 0 else "dense phase|is not 2:4"
        with pytest.raises(RunError, match=message):
            handle.finalize()
        assert len(handle.sparse) == 2
        assert bits(model.state_dict()) == before
        return
    handle.finalize()
    assert bits(model.state_dict()) == left


def test_the_final_state_of_a_dense_phase_is_pruned_by_magnitude():
    layer = nn.Linear(16, 8)
    optimizer = nmrun.optim.Adam(layer.parameters())
    handle = nmrun.sparsify(layer, optimizer, "step", "2:4", TOTAL, exclude=None)
    optimizer.step()  # without a gradient
    expected = layer.weight.detach() * top(layer.weight.detach(), 2, 4)
    assert handle.phase == "dense"
    assert torch.equal(Replicated(layer, optimizer, handle).final_state_dict()["weight"], expected)
    with pytest.raises(RunError, match=r"a dense phase of step, after step 1 of total_steps=8"):
        handle.finalize()
    average = copy.deepcopy(layer)
    handle.finalize(average)
    assert torch.equal(average.weight, expected)


def test_a_model_that_is_one_layer_and_one_that_is_attention():
    """Names without a module in front, and weights that are not called ``weight``."""
    for model in (nn.Linear(8, 4), nn.MultiheadAttention(8, 2, kdim=4, vdim=12)):
        objects, keys = dict(model.named_parameters()), list(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        handle = nmrun.sparsify(model, optimizer, "ste", "1:4", exclude=None)
        assert {w.name for w in handle.sparse} == {key for key in keys if key.endswith("weight")}
        assert list(model.state_dict()) == keys
        assert list(Replicated(model, optimizer, handle).final_state_dict()) == sorted(keys)
        check_nm(model, "1:4", exclude=None)
        optimizer.step()
        handle.finalize()
        assert list(model.state_dict()) == keys
        assert all(p is objects[name] for name, p in model.named_parameters())
        check_nm(model, "1:4", exclude=None)


# --- nmrun export ---------------------------------------------------------------------------------


def folder(place: Path, status: str = "finished", **changes: Tensor) -> Path:
    """A run folder, as far as the verb reads it: two sparse layers, one of them grouped along
    dimension 0 at a ratio of its own.
    """
    a, b = torch.tensor([[1.0, 0, 0, 2, 0, 3, 4, 0]] * 4), torch.zeros(16, 2)
    b[[0, 15]] = 5.0  # along the other dimension no 1:8
    layers = [
        {"name": "a", "pattern": "2:4", "dim": 1, "holds": True},
        {"name": "b", "pattern": "1:8", "dim": 0, "holds": True},
    ]
    state = {"a": a, "b": b, "bias": torch.ones(3), **changes}
    return write_run(place, state, layers, status=status)


def test_a_finished_run_is_copied_with_what_it_is(tmp_path, capsys):
    run, to = folder(tmp_path / "run"), tmp_path / "deep" / "to"
    assert export([str(run), "--out", str(to)]) == 0
    assert capsys.readouterr().out == f"{to / 'model.safetensors'}: 2:4, 1:8 hold in 2 layers\n"
    assert sorted(load_file(to / "model.safetensors")) == ["a", "b", "bias"]
    assert (to / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    about = json.loads((to / "sparsity.json").read_text())
    assert about.pop("layers") == result_of(run)["sparsity"]["layers"]
    assert about == {"pattern": "2:4", "recipe": {"name": "ste"}, "id": "0123456789"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": torch.ones(4, 8)}, "is not 2:4"),  # whatever result.json says
        # two of a column's first eight
        ({"b": torch.eye(16)[:, :2] + torch.eye(16)[:, 1:3]}, "is not 1:8"),
    ],
)
def test_what_does_not_hold_is_not_copied(changes, message, tmp_path, capsys):
    run = folder(tmp_path / "run", **changes)
    assert verb("export", str(run), "--out", str(tmp_path / "to")) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", struct.pack("<f", 2.0)),
        ("metrics.jsonl", b"0.5"),
        ("result.json", b"0.5"),
    ],
)
def test_what_was_changed_is_not_copied(name, content, tmp_path, capsys):
    """One bit of a kept weight, whose pattern holds as before, or one of a metric."""
    run, export = folder(tmp_path / "run"), lambda: verb("export", str(run), "--out", str(to))
    to = tmp_path / "to"
    assert export() == 0
    (run / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5}\n')
    result = result_of(run) | {"metrics": {"final": {"eval/accuracy": 0.5}, "best": {}}}
    rewrite(run, **result)
    assert export() == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(to)
    data = bytearray((run / name).read_bytes())
    at = data.index(content) + len(content) - 1
    data[at] ^= 1
    (run / name).write_bytes(data)
    assert export() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"nmrun: {run / name}: it was changed: its SHA-256 is another; remove")
    assert not to.exists()


def test_only_finished_runs_are_copied(tmp_path, capsys):
    failed = folder(tmp_path / "failed", "failed")
    bare, garbled = (folder(tmp_path / name) for name in ("bare", "garbled"))
    (bare / "model.safetensors").unlink()
    (garbled / "result.json").write_text("{")
    for run, status, message in (
        (garbled, 1, f"{garbled / 'result.json'}: it is damaged"),
        (bare, 1, f"{bare / 'model.safetensors'}: it is missing"),
        (failed, 2, f"{failed}: no finished run is there"),
        (tmp_path / "nothing", 2, f"{tmp_path / 'nothing'}: no finished run is there"),
    ):
        assert verb("export", str(run), "--out", str(tmp_path / "to")) == status
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"nmrun: {message}")
    assert not (tmp_path / "to").exists()
