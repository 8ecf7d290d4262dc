"""The benchmarks: what they time is what they say, and their output is well-formed. No timing is
asserted. The GPU is played on a CPU.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import played_gpu
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from verbs import verb

from nmrun.errors import extra
from nmrun.fast.cpu.dense_int8 import DenseInt8Linear
from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.onednn import OneDNNLinear, dtypes
from nmrun.fast.gpu import semi_structured
from nmrun.lab import bench, models
from nmrun.lab.bench import (
    harness,
    infer,
    kernel_times,
    layer,
    masks,
    networks,
    options,
    peers,
    recipes,
    train,
)
from nmrun.lab.train.build import build
from nmrun.patterns import Pattern
from nmrun.sparsity import hard_threshold, nm_mask

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 3, 3)])
def test_argsort_contrast_is_sr_ste(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    out = recipes.ArgsortSRSTE.apply(weight, 2, 4, 0.5)
    out.backward(upstream)
    mask = nm_mask(weight, "2:4")
    torch.testing.assert_close(out.detach(), weight.detach() * mask)
    torch.testing.assert_close(weight.grad, upstream + 0.5 * ~mask * weight.detach())


@pytest.mark.parametrize("recipe", recipes.ARMS)
def test_every_arm_trains_and_is_in_its_phase(recipe: str) -> None:
    torch.manual_seed(0)
    arm = recipes.RecipeArm(recipes.tiny(), recipes.ARMS[recipe], Pattern(2, 4), ())
    first = arm.model[0].weight.detach().clone()
    arm(torch.randn(8, 32), steps=3)
    used = arm.model[0].weight.detach()
    assert not torch.equal(used, first)
    most = int((used.reshape(-1, 4) != 0).sum(1).max())
    # on the way to the pattern
    fading = recipe.startswith(("mdgf", "sdgf")) or recipe in (
        "lbc",
        "maskllm",
        "proxsparse",
        "cast",
    )
    assert (most > 2) == (fading or recipe in ("dense_again", "step_phase_one"))


def test_arms_do_not_share_weights() -> None:
    model = recipes.tiny()
    before = [p.detach().clone() for p in model.parameters()]
    recipes.RecipeArm(model, recipes.ARMS["sr_ste"], Pattern(2, 4), ())(torch.randn(8, 32), steps=1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_command_writes_table_and_json(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "SHORTEST", 1)
    names = ["dense_again", "sr_ste"]
    options = [
        "--models",
        "tiny",
        "--sparsity",
        "2:4",
        "1:16",
        "--rounds",
        "4",
        "--out",
        str(tmp_path / "new"),
    ]
    assert bench.main([*options, "--recipes", *names]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "new" / "recipes_cpu.md").read_text().strip()
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0].split("|")[1:-1]] == [
        "recipe",
        "tiny 2:4",
        "tiny 1:16",
    ]
    assert [line.split("|")[1].strip() for line in table[2:]] == ["dense", *names]
    record = json.loads((tmp_path / "new" / "recipes_cpu.json").read_text())
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert [(row["pattern"], row["recipe"]) for row in record["rows"]] == [
        (p, r) for p in ("2:4", "1:16") for r in names
    ]
    for row in record["rows"]:
        assert 0 < row["ratio_q1"] <= row["ratio"] <= row["ratio_q3"]
        assert row["n"] == 4
        assert row["ms"] > 0
        assert row["dense_ms"] > 0


@pytest.mark.slow
def test_the_bare_command_leaves_out_what_cannot_be(capsys) -> None:
    """Its own recipes and ratios, on the smallest network alone."""
    assert bench.main(["--models", "tiny", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in printed.splitlines()
        if line.startswith("|")
    }
    cells = {name: each for name, each in cells.items() if name.strip("-")}
    assert cells.keys() == {"recipe", "dense", *options.RECIPES}
    assert cells["recipe"] == ["tiny 2:4", "tiny 1:16"]
    assert [name for name, (at_24, at_116) in cells.items() if not (at_24 and at_116)] == [
        "proxsparse"  # its proximal step is worked out for groups of 8 at most
    ]
    (line,) = [line for line in printed.splitlines() if "without" in line]
    assert line.startswith("tiny 1:16 without proxsparse: ")


@pytest.mark.parametrize("end", [KeyboardInterrupt, MemoryError])
def test_what_was_measured_is_reported_whatever_comes(
    end: type[BaseException], tmp_path, capsys, monkeypatch
) -> None:
    measure = recipes.measure

    def ends_at_116(name: str, pattern: Pattern, *arguments: Any) -> list[harness.Row]:
        if pattern == Pattern(1, 16):
            raise end
        return measure(name, pattern, *arguments)

    monkeypatch.setattr(recipes, "measure", ends_at_116)
    monkeypatch.setattr(recipes, "SHORTEST", 1)
    argv = ["--models", "tiny", "--rounds", "1", "--recipes", "ste", "--out", str(tmp_path)]
    with pytest.raises(end):
        bench.main(argv)
    assert "| tiny 2:4 " in capsys.readouterr().out.splitlines()[2]
    (row,) = json.loads((tmp_path / "recipes_cpu.json").read_text())["rows"]
    assert (row["recipe"], row["pattern"]) == ("ste", "2:4")


def test_of_rounds_that_are_cut_off_the_whole_ones_are_reported(
    tmp_path, capsys, monkeypatch
) -> None:
    """As by ``timeout``; cases behind are not begun, and the command ends as by Ctrl-C."""
    clock, measured = harness.Clock.__call__, list[object]()

    def cut_off(self: harness.Clock, call: Callable[[], object]) -> float:
        measured.append(call)
        if len(measured) == 3 + 2 * 3 + 2:  # a round to warm up, two whole ones, and one arm
            raise KeyboardInterrupt
        return clock(self, call)

    monkeypatch.setattr(harness.Clock, "__call__", cut_off)
    argv = ["masks", "--device", "cpu", "--weights", "0.01", "--arms", "nmrun", "--rounds", "5"]
    with pytest.raises(KeyboardInterrupt):
        bench.main([*argv, "--sparsity", "2:4", "1:4", "--out", str(tmp_path)])
    assert len(measured) == 11
    rows = written(tmp_path, "masks", printed := capsys.readouterr().out)
    assert [(row["pattern"], row["n"]) for row in rows] == [("2:4", 2)] * 3
    assert ", n = 2. " in printed
    monkeypatch.undo()
    assert bench.main([*argv, "--sparsity", "2:4", "--out", str(tmp_path)]) == 0
    assert ", n = 5. " in capsys.readouterr().out


def test_rounds_of_a_script_end_at_once() -> None:
    calls = iter(range(9))

    def clock(call: Callable[[], object]) -> float:
        if next(calls) == 5:  # after a whole round
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        harness.rounds({"one": lambda: None, "other": lambda: None}, 3, clock, warm_up=1)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models tiny --sparsity 1:128 --rounds 1", "1:128"),
        ("masks --sparsity 16:2:8", "16:2:8: kernels are timed with N:M"),
        ("update --sparsity 3:7 --weights 3", "no weight of this model can be 3:7 sparse"),
        ("layer --shapes 64x12", "64x12: inputs x outputs, multiples of 16"),
        ("layer --accumulate -1", "-1"),
        ("infer --device cpu --tokens 8x0", "8x0: a whole number, or two such as"),
        ("infer --device cuda", "torch sees no CUDA device here"),
    ],
)
def test_a_mistake_gets_a_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb("bench", *words.split()) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # behind what was being measured
    assert line.startswith("nmrun: ")
    assert message in line


def test_the_names_that_the_options_know_without_torch() -> None:
    assert tuple(recipes.WORKLOADS) == options.WORKLOADS
    assert tuple(recipes.ARMS) == options.RECIPES
    assert set(options.UPDATED) <= set(recipes.ARMS)
    assert tuple(masks.ARMS) == options.ARMS
    assert tuple(masks.FUNCTIONS) == options.FUNCTIONS
    decoders = {f"{name}{kind}" for name in infer.GPT2 | infer.LLAMA for kind in ("", infer.PROMPT)}
    assert {*options.INFERRED_NETWORKS} == {*infer.ENCODERS, *infer.IMAGES} | decoders
    assert options.PARSERS.keys() == bench.BENCHMARKS.keys()


def written(folder: Path, name: str, printed: str) -> list[dict[str, Any]]:
    """The rows of a result, whose page must be what was printed."""
    assert (folder / f"{name}_cpu.md").read_text().strip() == printed.strip()
    record = json.loads((folder / f"{name}_cpu.json").read_text())
    assert record["benchmark"] == name
    assert record["command"].startswith(f"nmrun bench {name}")
    assert record["hardware"]["torch"] == torch.__version__
    for row in record["rows"]:
        if "wrong" not in row:
            assert row["n"] >= 1
            assert 0 < row["ms_q1"] <= row["ms"] <= row["ms_q3"]
    return list(record["rows"])


# --- timing and tables ----------------------------------------------------------------------------


def test_quartiles_and_paired_ratios() -> None:
    assert harness.quartiles("ms", [4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "ms": 3.0,
        "ms_q1": 2.0,
        "ms_q3": 4.0,
    }
    assert harness.quartiles("ms", [7.0]) == {"ms": 7.0, "ms_q1": 7.0, "ms_q3": 7.0}
    # 2, 4 and 1 times as fast, whatever the medians are
    row = harness.speedup([1.0, 10.0, 2.0], [2.0, 40.0, 2.0])
    assert (row["n"], row["ms"], row["speedup"]) == (3, 2.0, 2.0)


def test_a_round_runs_every_arm_once() -> None:
    seen: list[str] = []
    times = harness.rounds(
        {name: lambda name=name: seen.append(name) for name in "abc"},
        8,
        harness.Clock(CPU),
        warm_up=1,
    )
    assert {name: len(values) for name, values in times.items()} == {"a": 8, "b": 8, "c": 8}
    rounds = ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 3  # in changing orders


def test_tables() -> None:
    rows = [
        {"a": 1, "b": "x", "ms": 2.0},
        {"a": 1, "b": "y", "wrong": "out of memory"},
        {"a": 20, "b": "x", "ms": 3.5},
    ]
    assert harness.grid(rows, "a", "b", lambda row: f"{row['ms']} ms").splitlines() == [
        "| a  | x      | y             |",
        "|----|--------|---------------|",
        "| 1  | 2.0 ms | out of memory |",
        "| 20 | 3.5 ms |               |",
    ]
    assert harness.spread({"v": 1.2345, "v_q1": 0.05, "v_q3": 120.0}, "v") == "1.23 [0.0500, 120]"


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", ["2:4", "1:16", "8:32", "4:4"])
@pytest.mark.parametrize("arm", masks.ARMS)
def test_each_way_finds_the_same_masks(arm: str, ratio: str) -> None:
    torch.manual_seed(0)
    weight, pattern = torch.randn(5, 64), Pattern.parse(ratio)
    out = torch.full_like(weight, 7.0)
    masks.ARMS[arm](weight, out, pattern)
    assert torch.equal(out, hard_threshold(weight, pattern))


def test_the_functions_measure_what_they_say() -> None:
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.5], [1.0, 4.0, -2.0, 2.0]])
    before = torch.tensor([[True, True, False, False], [False, True, True, False]])
    call = {
        name: partial(each, weight, before, Pattern(2, 4)) for name, each in masks.FUNCTIONS.items()
    }
    assert call["nm_mask"]().tolist() == [[True, False, True, False], [False, True, True, False]]
    assert call["flip_rate"]() == 2 / 8
    assert call["kept_energy"]() == pytest.approx(
        (9 + 4 + 16 + 4) / (9 + 1 + 4 + 0.25 + 1 + 16 + 4 + 4)
    )
    columns = call["nm_mask dim 0"]()  # the same memory as a matrix (4, 2)
    assert columns.tolist() == [[True, False], [True, False], [False, True], [False, True]]


@pytest.mark.slow
def test_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--sparsity",
        "2:4",
        "3:7",
        "--weights",
        "0.01",
        "0.02",
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "new"),
    ]
    assert bench.main(["masks", *words]) == 0
    rows = written(tmp_path / "new", "masks", printed := capsys.readouterr().out)
    assert len(rows) == 2 * 2 * (2 + len(masks.ARMS) + len(masks.FUNCTIONS))
    assert "| clone " in printed
    assert "| 2:4 " in printed
    for row in rows:
        assert row["gb_per_second"] > 0
        assert row["copies"] == 1 or row["arm"] not in ("copy", "clone")


@pytest.mark.slow
def test_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--weights",
        "0.1",
        "--recipes",
        "sr_ste",
        "asp",
        "--rounds",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert bench.main(["update", *words]) == 0
    rows = written(tmp_path, "update", printed := capsys.readouterr().out)
    assert [(row["recipe"], row["arm"]) for row in rows] == [
        (r, a) for r in ("sr_ste", "asp") for a in ("one pass", "apart")
    ]
    assert "| recipe | 2:4 one pass" in printed
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")
def test_ratios_that_do_not_divide_the_inputs_are_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--tokens", "8", "--rounds", "1", "--sparsity", "2:3"]
    assert verb("bench", "gemm", *words, "--shapes", "16x32") == 2
    assert "16 to 32 without 2:3: 3 does not divide 16" in capsys.readouterr().err
    shapes = ["--shapes", "16x48", "--out", str(tmp_path)]
    assert bench.main(["gemm", *words, "2:4", *shapes]) == 0
    rows = written(tmp_path, "gemm", printed := capsys.readouterr().out)
    assert "16 to 48 without 2:3: 3 does not divide 16" in printed.splitlines()
    assert {(row["shape"], row["arm"]) for row in rows if ":" in row["arm"]} == {
        ("16 to 48", "2:4"), ("48 to 16", "2:3"), ("48 to 16", "2:4"),
    }  # fmt: skip


def test_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert harness.nvidia_smi("driver_version") == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '700.00 W, 535.1'\n")
    tool.chmod(0o755)
    assert harness.nvidia_smi("power.limit", "driver_version") == ["700.00 W", "535.1"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert harness.nvidia_smi("driver_version") == []


# --- with a GPU that is played --------------------------------------------------------------------


def rounded(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
    """As a tensor core: sums in float32, rounded once."""
    values, where = parts
    weight = values.new_zeros(*values.shape[:2], 4).scatter(2, where, values).flatten(1)
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(
        x.dtype
    )


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> played_gpu.Machine:
    machine = played_gpu.play(monkeypatch.setattr, tmp_path)
    monkeypatch.setattr(options, "no_gpu", lambda: False)
    right = semi_structured.Path(semi_structured.separately(played_gpu.two_values), rounded)
    wrong = semi_structured.Path(right.pack, lambda x, parts, bias: rounded(x, parts, bias) * 1.1)
    monkeypatch.setattr(
        semi_structured,
        "PATHS",
        {"compressed": right, "broken": wrong, "cusparselt_fp8": semi_structured.CUSPARSELT_FP8},
    )
    return machine


@pytest.mark.slow
def test_gemm(gpu: played_gpu.Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--shapes",
        "32x64",
        "32x32",
        "--tokens",
        "16",
        "40",
        "--rounds",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    assert bench.main(["gemm", *words]) == 0
    rows = written(tmp_path / "out", "gemm", printed := capsys.readouterr().out)
    assert [
        (row["shape"], row["tokens"])
        for row in rows
        if row["path"] == "compressed" and row["speedup"] > 0
    ] == [(shape, tokens) for shape in ("32 to 64", "64 to 32", "32 to 32") for tokens in (16, 40)]
    assert [row.get("wrong") for row in rows if row["path"] == "broken"] == ["WRONG results"] * 6
    assert "broken:\n\nWRONG results, at all sizes" in printed
    dense = next(row for row in rows if row["path"] == "dense")
    assert dense["tflops"] == pytest.approx(2 * 16 * 32 * 64 / dense["ms"] / 1e9, rel=1e-3)


@pytest.mark.slow
def test_layer_by_products(
    gpu: played_gpu.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer.LayerArm, "dtype", torch.bfloat16)
    words = ["--shapes", "32x64", "--tokens", "16", "--rounds", "2", "--out", str(tmp_path / "out")]
    assert bench.main(["layer", *words]) == 0
    rows = json.loads((tmp_path / "out" / "layer_cpu.json").read_text())["rows"]
    assert [(row["arm"], row["path"]) for row in rows if row["accumulate"] == 4] == [
        ("dense", "dense"), ("masked", "dense"), *((arm, "compressed") for arm in layer.ARMS if arm not in ("masked", "2:4, FP8")),
        ("2:4, FP8", "cusparselt_fp8"),
    ]  # fmt: skip
    monkeypatch.setattr(semi_structured, "PATHS", {"broken": semi_structured.PATHS["broken"]})
    rows = layer.measure(32, 64, 16, 1, 1, CPU)
    assert {row["arm"] for row in rows if "broken: WRONG results" in row.get("wrong", "")} == set(
        layer.ARMS
    ) - {
        "masked",
        "2:4, FP8",
    }


def test_a_layer_that_a_library_refuses_is_a_line(
    gpu: played_gpu.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = layer.LayerArm.__call__

    def refusing(arm: layer.LayerArm) -> None:
        if arm.path == "cusparselt_fp8":
            raise RuntimeError("not supported\nand where")
        step(arm)

    monkeypatch.setattr(layer.LayerArm, "dtype", torch.bfloat16)
    monkeypatch.setattr(layer.LayerArm, "__call__", refusing)
    rows = layer.measure(32, 64, 16, 1, 1, CPU)
    wrong = {row["arm"]: row["wrong"] for row in rows if "wrong" in row}
    assert wrong == {"2:4, FP8": "not supported"}
    assert sum("ms" in row for row in rows) == len(layer.ARMS)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", layer.ARMS)
def test_a_step_of_a_layer(name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward for every micro-batch, the projection once."""
    recipe, options, _ = layer.ARMS[name]
    arm = layer.LayerArm(recipe, options, False, 32, 64, 16, accumulate, CPU)
    calls: list[str] = []

    def counted(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        return lambda *args: (calls.append(name), call(*args))[1]

    monkeypatch.setattr(arm, "forward", counted("forward", arm.forward))
    monkeypatch.setattr(arm.handle, "refresh", counted("project", arm.handle.refresh))
    handle = arm.x.register_hook(lambda grad: calls.append("backward"))
    arm()
    handle.remove()
    assert calls == ["forward", "backward"] * accumulate + ["project"]
    assert arm.x.grad is None
    groups = arm.handle.sparse[0].weight.reshape(-1, 4)
    assert int((groups != 0).sum(1).max()) == 2


@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")
def test_infer_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--models",
        "tiny",
        "--sparsity",
        "1:4",
        "3:7",
        "--tokens",
        "1",
        "2x9",
        "--rounds",
        "2",
    ]
    words += ["--arms", "torch", "onednn", "packed", "--precisions", "float32"]
    threads = torch.get_num_threads()
    out = tmp_path / "out"
    assert (
        bench.main(["infer", "--device", "cpu", *words, "--threads", "1", "--out", str(out)]) == 0
    )
    assert torch.get_num_threads() == threads
    rows = json.loads((out / "infer_1_threads_cpu.json").read_text())["rows"]
    assert (out / "infer_1_threads_cpu.md").read_text() in capsys.readouterr().out
    arms = (("torch", ""), ("onednn", ""), ("packed", "1:4"), ("packed", "3:7"))
    assert [((r["sequences"], r["tokens"]), (r["arm"], r["pattern"])) for r in rows] == [
        (size, arm) for size in ((1, 1), (2, 9)) for arm in arms
    ]
    assert all("wrong" not in row and row["ms"] > 0 and row["off"] < 1e-5 for row in rows)
    for row in rows:
        if row["arm"] == "packed":
            assert row["layers"].endswith(" of 5")
            assert row["over_torch_by"] == "torch"
            assert row["over_float32_by"] in ("torch", "onednn")
            assert 0 < row["over_float32_q1"] <= row["over_float32"] <= row["over_float32_q3"]


def test_arms_without_a_precision_are_a_line_and_a_mistake_where_they_are_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--device", "cpu", "--models", "tiny", "--tokens", "1", "--rounds", "1"]
    words += ["--precisions", "int8", "--arms", "compiled"]
    assert verb("bench", "infer", *words, "--out", str(tmp_path)) == 2
    assert "tiny, compiled: it has no products of int8" in capsys.readouterr().err.splitlines()[-1]
    assert not [*tmp_path.iterdir()]
    assert bench.main(["infer", *words, "torch"]) == 0
    assert "compiled: it has no products of int8" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", list(peers.RUNTIMES))
def test_a_runtime_that_is_missing_or_cannot_take_a_network_is_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'far'", name="far")

    def unable(*_: Any) -> Any:
        raise TypeError("no such\noperator")

    model, x, asked = infer.network("tiny", (1, 3)), infer.example("tiny", (1, 3)), ["float32"]
    for runtime, message in (
        (absent, f"far is not installed: {extra('bench')}"),
        (unable, "cannot take this network: TypeError: no such"),
    ):
        monkeypatch.setitem(peers.RUNTIMES, name, runtime)
        assert peers.arms([name], model, x, asked) == ({}, {name: message})
        (first, second) = infer.measure("tiny", [], (1, 3), asked, ["torch", name], 1, CPU)
        assert first["arm"] == "torch"
        assert (second["arm"], second["missing"]) == (name, message)
        assert f"{name}: {message}" in infer.page([first, second], CPU).splitlines()


def test_what_fails_on_the_way_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not deployed, and a pass that fails when it becomes a graph: the second."""

    def compiled(model: nn.Module, x: Tensor, precisions: Any) -> Any:
        passes = iter([model(x)])

        def call(x: Tensor) -> Tensor:
            for output in passes:
                return output
            raise RuntimeError("not in a graph\nand where")

        yield "float32", call

    def refusing(*_: Any, **how: Any) -> Any:
        raise RuntimeError("no graph of it\nand where")

    monkeypatch.setitem(peers.RUNTIMES, "compiled", compiled)
    monkeypatch.setattr(infer, "deploy", refusing)
    arms = ["torch", "compiled", "packed"]
    rows = infer.measure("tiny", [Pattern(2, 4)], (1, 3), ["float32"], arms, 1, CPU)
    assert [row["arm"] for row in rows if "ms" in row] == ["torch"]
    assert {row["arm"]: row["missing"] for row in rows if "missing" in row} == {
        "float32 packed 2:4": "no graph of it",
        "float32 compiled": "not in a graph",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"),
    [("compiled", "torch"), ("onnxruntime", "onnxruntime"), ("openvino", "nncf")],
)
def test_runtimes_compute_what_torch_does(name: str, module: str) -> None:
    pytest.importorskip(module)
    torch.manual_seed(0)
    model, x = infer.network("tiny", (2, 9)), infer.example("tiny", (2, 9))
    precisions = ["float32"] if name == "compiled" else ["float32", "int8"]
    calls, missing = peers.arms([name], model, x, precisions)
    assert missing == {}
    assert list(calls) == [(precision, name) for precision in precisions]
    with torch.no_grad():
        expected = model(x)
        for (precision, _), call in calls.items():
            off = float((call(x) - expected).norm() / expected.norm())
            assert off < {"float32": 1e-5, "int8": 0.03}[precision]


def test_a_precision_without_instructions_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "has_bf16", lambda: False)
    assert verb("bench", "infer", "--device", "cpu", "--precisions", "bf16") == 2
    message = "nmrun: --precisions bf16: this processor has no instructions for it"
    assert capsys.readouterr().err.splitlines() == [message]


@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")
@pytest.mark.parametrize(
    ("name", "inputs", "vocabulary", "layers"),
    [
        ("gpt2", (5, 1), 50257, 9),  # four a block, and the tied head
        ("gpt2_prompt", (1, 5), 50257, 9),
        # seven a block, and the head
        pytest.param("llama_7b_block", (5, 1), 32000, 15, marks=pytest.mark.slow),
        pytest.param("llama_7b_block_prompt", (1, 5), 32000, 15, marks=pytest.mark.slow),
    ],
)
def test_infer_of_a_small_language_model(
    name: str,
    inputs: tuple[int, int],
    vocabulary: int,
    layers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(infer.GPT2, "gpt2", (2, 32, 2))
    monkeypatch.setitem(infer.LLAMA, "llama_7b_block", (2, 32, 2))
    x, model = infer.example(name, (1, 5)), infer.network(name, (1, 5))
    assert x.shape == inputs
    output = model(x)
    assert output.shape == (inputs[0], 1, vocabulary)
    whole = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(whole(x), output)
    model.model.set_attn_implementation("sdpa")  # with a mask
    torch.testing.assert_close(model(x), output)
    arms = ["torch", "onednn", "packed"]
    rows = infer.measure(name, [Pattern(1, 4)], (1, 5), ["float32"], arms, 2, CPU)
    assert [row["arm"] for row in rows] == arms
    assert not any("wrong" in row for row in rows)
    assert rows[-1]["layers"].endswith(f"of {layers}")


@pytest.mark.slow
@pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")
def test_infer_of_images_on_a_cpu(tmp_path: Path) -> None:
    words = ["--models", "resnet18", "--sparsity", "1:8", "--tokens", "2", "--rounds", "1"]
    words += ["--arms", "torch", "onednn", "packed", "--precisions", "float32"]
    out = tmp_path / "out"
    assert bench.main(["infer", "--device", "cpu", *words, "--out", str(out)]) == 0
    (file,) = out.glob("infer_*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["arm"] for row in rows] == ["torch", "onednn", "packed"]
    assert all("wrong" not in row and row["ms"] > 0 for row in rows)
    assert rows[-1]["layers"].endswith(" of 21")
    assert "resnet18, 2 images: 1:8 in float32" in file.with_suffix(".md").read_text()


# --- train ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--models",
        "gpt_tiny",
        "vit_small_32",
        "--device",
        "cpu",
        "--rounds",
        "1",
        "--steps",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert bench.main(["train", *words, "trainer.batch_size=4", "trainer.threads=1"]) == 0
    rows = written(tmp_path, "train", capsys.readouterr().out)
    assert [(row["model"], row["arm"]) for row in rows] == [
        (m, a) for m in ("gpt_tiny", "vit_small_32") for a in options.TRAINING_ARMS
    ]
    items = {"gpt_tiny": 4 * 64, "vit_small_32": 4}
    for row in rows:
        assert row["items_per_second"] == pytest.approx(
            1e3 * items[row["model"]] / row["ms"], rel=1e-3
        )
        sparse = {"gpt_tiny": 8, "vit_small_32": 4}[row["model"]]
        assert row.get("layers", "") in {
            "masked": [f"0 of {sparse}"],
            "accelerated": [f"{count} of {sparse}" for count in range(sparse + 1)],
        }.get(row["arm"], [""])


def test_an_arm_that_does_not_compile_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: Any, steps: int) -> Any:
        def stretch() -> None:
            raise RuntimeError("backend='inductor' raised\nand where")

        return stretch, {}

    monkeypatch.setattr(train, "bare", broken)
    words = ["--models", "gpt_tiny", "--device", "cpu", "--rounds", "1", "--steps", "1", "--arms"]
    words += ["bare", "masked", "--out", str(tmp_path), "trainer.batch_size=2"]
    assert bench.main(["train", *words, "trainer.threads=1"]) == 0
    rows = written(tmp_path, "train", text := capsys.readouterr().out)
    assert {row["arm"] for row in rows if "ms" in row} == {"dense", "masked"}
    (row,) = [row for row in rows if "wrong" in row]
    assert (row["arm"], row["wrong"]) == ("bare", "backend='inductor' raised")
    assert "| bare   | backend='inductor' raised" in text


def test_a_profile_that_fails_loses_no_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # torch's own wants a GPU
    monkeypatch.setattr(kernel_times, "profile", lambda **_: contextlib.nullcontext())

    def stretch() -> None:
        raise torch.OutOfMemoryError("out of memory")

    assert kernel_times.kernels_of(stretch, 10) == {}
    assert "not profiled: out of memory" in capsys.readouterr().err


def test_where_a_step_goes() -> None:
    """Names as torch's profiler has them on an H100."""
    kernels = {
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": 3.0,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": 1.0,
        "sm90_xmma_sparse_gemm_bf16bf16_bf16f32_f32_tn_t_tilesize128x256x128": 2.0,
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>": 0.5,
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": 0.25,
        "adam_many": 0.25,
        "pack_many": 0.0625,
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, Copy<BFloat16, float>>": 0.0625,
        "Memcpy DtoD (Device -> Device)": 0.0625,
        "triton_per_fused_native_layer_norm_0": 0.75,
    }
    found = kernel_times.by_kind(kernels, 10.0)
    assert found == {
        "masks and packing": 0.125,
        "optimizer": 0.5,
        "attention": 0.5,
        "2:4 products": 2.0,
        "dense products": 4.0,
        "copies": 0.0625,
        "the rest": 0.75,
        "idle": 10.0 - 7.9375,
    }
    # a profiled stretch may take longer than the timed ones
    assert kernel_times.by_kind(kernels, 7.0)["idle"] == 0.0
    row = {"model": "gpt2", "sparsity": "2:4", "arm": "dense"}
    table = train.profiled([row, {**row, "arm": "accelerated", "kinds": found}])
    assert table.splitlines()[-1].startswith("| gpt2  | 2:4 | accelerated | 0.125")
    assert train.profiled([row]) == ""


def test_the_bare_loop_takes_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[Any] = []
    monkeypatch.setattr(train, "build", lambda config: builds.append(build(config)) or builds[-1])
    networks.random_text(tmp_path)
    words = [
        *networks.NETWORKS["gpt_tiny"],
        "recipe=dense",
        "trainer.device=cpu",
        "trainer.threads=1",
        "trainer.batch_size=4",
    ]
    config = networks.composed(tmp_path, [*words, "trainer.accumulate=2"])
    (ours, about), (bare, _) = train.ours(config, 1), train.bare(config, 1)
    assert (about["items"], about["peak"], "layers" in about) == (256, None, False)
    assert about["flops"] > 0
    before = [p.detach().clone() for p in builds[0].model.parameters()]
    ours()
    bare()
    for old, one, other in zip(
        before, *(parts.model.parameters() for parts in builds), strict=True
    ):
        assert not torch.equal(old, one)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name", [name for name in networks.NETWORKS if name not in ("gpt_tiny", "vit_small_32")]
)
def test_the_large_networks_are_what_their_names_say(name: str, tmp_path: Path) -> None:
    millions = {
        "gpt_512": 19,
        "gpt2": 124,
        "gpt2_medium": 355,
        "gpt2_large": 774,
        "gpt_1_3b": 1314,
        # embeddings, positions, and twelve matrices of 4096 x 4096 in each of two blocks
        "gpt_4096": 445,
        "vit_large": 304,
        "vit_huge": 632,
        "resnet18": 11.7,
    }[name]
    config = networks.composed(tmp_path, ["recipe=dense", *networks.NETWORKS[name]])
    keys = config.dataset.values()
    inputs = (
        {"shape": (3, keys["side"], keys["side"]), "classes": 1000}
        if "side" in keys
        else {"vocabulary": keys["vocabulary"], "context": keys["context"]}
    )
    with torch.device("meta"):
        model = models.build(config.model.mapping(), inputs)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_onednns_copies_of_dense_layers_count_too() -> None:
    weight = torch.randn(256, 512)
    for one, expected in (
        (DenseInt8Linear.of(weight), 0.5),
        (OneDNNLinear(weight, None), 1.0),  # which has no copy
        *([(OneDNNLinear(weight.bfloat16(), None), 1.0)] if torch.bfloat16 in dtypes() else []),
    ):
        share = infer.model_bytes(nn.Sequential(one)) / weight.nbytes
        assert share == pytest.approx(expected, abs=0.01)


@pytest.mark.skipif(torch.bfloat16 not in dtypes(), reason="torch has no oneDNN in bfloat16 here")
def test_onednn_in_bfloat16_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    model, x = infer.network("tiny", (2, 9)).bfloat16(), infer.example("tiny", (2, 9)).bfloat16()
    with torch.no_grad():
        expected, actual = model(x).double(), infer.by_onednn(model, x, "bf16")(x).double()
    assert float((actual - expected).norm() / expected.norm()) < 0.01
