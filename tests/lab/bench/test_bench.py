"""The benchmarks: what they time is what they say, and their output is well-formed. No timing is
asserted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from verbs import verb

from nmrun.fast.cpu.kernels import products
from nmrun.fast.cpu.onednn import DenseInt8Linear, OneDNNLinear, dtypes
from nmrun.lab import bench, models
from nmrun.lab.bench import harness, infer, options, train
from nmrun.lab.bench.harness import Benchmark, Case
from nmrun.lab.train.build import build
from nmrun.patterns import Pattern
from nmrun.sparsity import hard_threshold

CPU = torch.device("cpu")
SMALL = ("trainer.batch_size=4", "trainer.threads=1", "trainer.device=cpu")

# --- the harness ----------------------------------------------------------------------------------


def test_quartiles_and_paired_ratios():
    row = harness.quartiles("ms", [4.0, 1.0, 3.0, 2.0, 5.0])
    assert row == {"ms": 3.0, "ms_q1": 2.0, "ms_q3": 4.0}
    assert harness.quartiles("ms", [7.0]) == {"ms": 7.0, "ms_q1": 7.0, "ms_q3": 7.0}
    # 2, 4 and 1 times as fast, whatever the medians are
    row = harness.speedup([1.0, 10.0, 2.0], [2.0, 40.0, 2.0])
    assert (row["n"], row["ms"], row["speedup"]) == (3, 2.0, 2.0)


@pytest.mark.slow
def test_a_round_runs_every_arm_once():
    seen: list[str] = []
    arms = {name: partial(seen.append, name) for name in "abc"}
    times = harness.rounds(arms, 8, harness.Clock(CPU), warm_up=1)
    assert list(times) == ["a", "b", "c"]
    assert {len(values) for values in times.values()} == {8}
    rounds = ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 3  # in changing orders


def test_tables():
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


def test_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert harness.nvidia_smi("driver_version") == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '700.00 W, 535.1'\n")
    tool.chmod(0o755)
    assert harness.nvidia_smi("power.limit", "driver_version") == ["700.00 W", "535.1"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert harness.nvidia_smi("driver_version") == []


def played(ends: dict[int, type[BaseException]], folder: Path) -> None:
    """Two cases of two arms in two rounds, with a clock on which "dense" takes 2 ms and "sparse" 1;
    the call of a number ends by an exception."""
    calls: list[object] = []

    class Clock(harness.Clock):
        def __call__(self, call: Callable[[], object]) -> float:
            calls.append(call)
            if end := ends.get(len(calls)):
                raise end("no more\nand where")
            return float(call())  # type: ignore[arg-type]

    arms = {"dense": lambda _: lambda: 2.0, "sparse": lambda _: lambda: 1.0}
    cases = [Case({"case": name}, arms) for name in ("one", "two")]
    page = partial(harness.speeds, "Played", "case")
    harness.run("played", Benchmark(cases, page, Clock(CPU), 2), folder, "played")


def written(folder: Path, name: str = "played") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((folder / f"{name}_cpu.json").read_text())["rows"]
    return rows


@pytest.mark.slow
def test_a_page_has_what_was_measured(tmp_path, capsys):
    played({}, tmp_path)
    printed, first = capsys.readouterr()
    assert (tmp_path / "played_cpu.md").read_text() == printed
    assert "| one  | 2 ms  | 2.00 [2.00, 2.00] |" in printed
    assert [(row["case"], row["arm"], row["n"]) for row in written(tmp_path)] == [
        (case, arm, 2) for case in ("one", "two") for arm in ("dense", "sparse")
    ]
    # a time of each arm before the rounds
    said = ("{}, dense: 2 ms at first", "{}, sparse: 1 ms at first", "{}: 2 rounds of 2 arms")
    assert first.splitlines() == [line.format(case) for case in ("one", "two") for line in said]


# an arm takes two calls to warm up and a first time, so a case's rounds are calls 7 to 10
@pytest.mark.parametrize(("call", "rounds"), [(10, 1), (12, 2)])
@pytest.mark.parametrize("end", [KeyboardInterrupt, MemoryError])
def test_whole_rounds_are_reported_whatever_comes(call, rounds, end, tmp_path, capsys):
    with pytest.raises(end):
        played({call: end}, tmp_path)
    assert "| one " in capsys.readouterr().out
    reported = [(row["case"], row["arm"], row["n"]) for row in written(tmp_path)]
    assert reported == [("one", "dense", rounds), ("one", "sparse", rounds)]


def test_an_arm_that_fails_is_a_line(tmp_path, capsys):
    """Also for want of memory; the first, with which the others are compared, ends its case."""
    played({4: RuntimeError, 7: torch.OutOfMemoryError}, tmp_path)
    failed = [row for row in written(tmp_path) if row.get("wrong") == "no more"]
    assert [(row["case"], row["arm"]) for row in failed] == [("one", "sparse"), ("two", "dense")]
    printed, first = capsys.readouterr()
    assert "no more" in printed
    assert "one, sparse: no more\n" in first


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("infer --device cpu --tokens 8x0", "8x0: it takes a whole number, or two such as"),
        ("infer --device cuda", "torch sees no CUDA device here"),
        ("infer trainer.batch_size=3", "takes no overrides"),
        ("train --arms sr_tse", "did you mean sr_ste?"),
        ("train seed=1,2", "seed=1,2: it takes one value"),
        ("train model=mlp", "--models chooses"),
    ],
)
def test_a_mistake_gets_a_line(words, message, capsys):
    assert verb("bench", *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nmrun: ")
    assert message in line


def test_the_arms_that_a_processor_can_have(monkeypatch):
    monkeypatch.setattr(infer, "has_bf16", lambda: False)
    there = SimpleNamespace(KERNELS=SimpleNamespace(obstacle=lambda: ""))
    monkeypatch.setattr(infer, "int8", there)
    kinds, patterns = ("compiled", "openvino", "packed"), [Pattern(2, 4), Pattern(1, 8)]
    assert infer.chosen(kinds, patterns, None, CPU) == [
        *(("float32", "compiled", ""), ("float32", "openvino", ""), ("int8", "openvino", "")),
        *(("float32", "packed", "2:4"), ("float32", "packed", "1:8")),
        *(("int8", "packed", "2:4"), ("int8", "packed", "1:8")),
    ]
    assert infer.chosen(["compiled"], patterns, ["int8"], CPU) == []


# --- infer ----------------------------------------------------------------------------------------


COMPILES = pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler works here")


def inferred(words: str, out: Path) -> list[dict[str, Any]]:
    """What ``nmrun bench infer`` says of float32 on a CPU."""
    asked = f"infer --device cpu --precisions float32 --arms torch packed --out {out} {words}"
    assert bench.main(asked.split()) == 0
    return written(out, "infer")


@pytest.mark.slow
@COMPILES
def test_infer_on_a_cpu(tmp_path, capsys):
    words = "--models tiny --tokens 1 2x9 --rounds 2 --threads 1 --sparsity 1:4 3:7"
    rows = inferred(words, tmp_path / "out")
    assert (tmp_path / "out" / "infer_cpu.md").read_text() in capsys.readouterr().out
    arms = (("torch", ""), ("packed", "1:4"), ("packed", "3:7"))
    assert [((r["sequences"], r["tokens"]), (r["arm"], r["pattern"])) for r in rows] == [
        (size, arm) for size in ((1, 1), (2, 9)) for arm in arms
    ]
    assert all("wrong" not in row and row["ms"] > 0 and row["off"] < 1e-5 for row in rows)
    for row in rows:
        if row["arm"] == "packed":
            assert row["layers"].endswith(" of 5")
            assert row["over_float32_by"] == "torch"
            assert 0 < row["over_float32_q1"] <= row["over_float32"] <= row["over_float32_q3"]


@pytest.mark.slow
@COMPILES
def test_infer_of_images_on_a_cpu(tmp_path):
    rows = inferred("--models resnet18 --sparsity 1:8 --tokens 2 --rounds 1", tmp_path)
    assert [row["arm"] for row in rows] == ["torch", "packed"]
    assert all("wrong" not in row and row["ms"] > 0 for row in rows)
    assert rows[-1]["layers"].endswith(" of 21")
    assert "resnet18, 2 images: packed 1:8 in float32" in (tmp_path / "infer_cpu.md").read_text()


def test_weights_whose_outputs_do_not_fit_stay_dense():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 10))
    pruned = infer.prune(model, Pattern.parse("16:2:8"))
    assert torch.equal(pruned[0].weight, hard_threshold(model[0].weight, "16:2:8"))
    assert torch.equal(pruned[1].weight, model[1].weight)


def rows_of(*arms: infer.Arm) -> list[harness.Row]:
    """Of the smallest network, measured once."""
    case = infer.case("tiny", (1, 3), *infer.network("tiny", (1, 3)), arms)
    rows: list[harness.Row] = []
    harness.measure(case, 1, harness.Clock(CPU), rows)
    infer.compared(rows)
    return rows


def test_wrong_outputs_are_not_compared_with(monkeypatch):
    monkeypatch.setattr(infer, "compiled", lambda model, _: lambda x: 2 * model(x))
    torchs, compiled = rows_of(("float32", "compiled", ""))
    assert compiled["off"] == pytest.approx(1.0)
    assert compiled["wrong"]
    assert torchs["over_float32_by"] == "torch"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'far'", name="far"), "far is not installed"),
        (TypeError("no such\noperator"), "TypeError: no such"),
    ],
)
def test_a_runtime_that_is_missing_or_cannot_take_a_network_is_a_line(error, reason, monkeypatch):
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(infer, "_openvino", fails)
    torchs, openvino = rows = rows_of(("int8", "openvino", ""))
    assert torchs["ms"] > 0
    assert reason in openvino["wrong"]
    assert reason in infer.page(rows, harness.Clock(CPU))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "module"),
    [("compiled", "float32", "torch"), ("openvino", "float32", "openvino"), ("openvino", "int8", "nncf")],
)  # fmt: skip
def test_runtimes_compute_what_torch_does(name, precision, module):
    pytest.importorskip(module)
    torch.manual_seed(0)
    _, row = rows_of((precision, name, ""))
    assert row["off"] < {"float32": 1e-5, "int8": 0.03}[precision]


def test_onednns_copies_of_dense_layers_count_too():
    weight = torch.randn(256, 512)
    for one, expected in (
        (DenseInt8Linear.of(weight), 0.5),
        (OneDNNLinear(weight, None), 1.0),  # which has no copy
        *([(OneDNNLinear(weight.bfloat16(), None), 1.0)] if torch.bfloat16 in dtypes() else []),
    ):
        share = infer.model_bytes(nn.Sequential(one)) / weight.nbytes
        assert share == pytest.approx(expected, abs=0.01)


# --- train ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_train(tmp_path, capsys):
    """Each recipe by its defaults, through all of its phases."""
    words = ["--rounds", "2", "--steps", "1", "--sparsity", "1:16", "--out", str(tmp_path)]
    assert bench.main(["train", *words, *SMALL]) == 0
    rows = {row["arm"]: row for row in written(tmp_path, "train")}
    assert [*rows][:3] == ["dense", "plain_loop", "masked_loop"]
    assert {"step", "sr_ste", "maskllm", "t_sr_ste"} <= rows.keys()
    # a proximal step is worked out for groups of 8 at most, and 64 inputs have no 8:128
    missing = {arm for arm, row in rows.items() if "wrong" in row}
    assert missing == {"proxsparse", "sdgf_geometric"}
    assert " without proxsparse: " in capsys.readouterr().out
    for row in rows.values():
        if "wrong" not in row:
            assert row["items_per_second"] == pytest.approx(1e3 * 4 * 64 / row["ms"], rel=1e-3)
    assert rows["sr_ste"]["layers"].endswith(" of 8")
    assert "layers" not in rows["masked_loop"]


def loops(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> tuple[Any, list[nn.Module]]:
    """Makes a loop of one step of a small GPT by its name, and the models that they train."""
    trained: list[nn.Module] = []

    def kept(config: Any) -> Any:
        parts = build(config)
        trained.append(parts.model)
        return parts

    monkeypatch.setattr(train, "build", kept)
    options.random_text(folder)
    words = (*options.NETWORKS["gpt_tiny"], *SMALL, "trainer.accumulate=2", *words)
    arms = train.loops(folder, words, Pattern(2, 4), ("ste", "plain_loop", "masked_loop"), 1)
    return (lambda name: arms[name]({})), trained


def test_the_bare_loop_takes_the_same_step(tmp_path, monkeypatch):
    loop, trained = loops(tmp_path, monkeypatch)
    ours, plain = loop("dense"), loop("plain_loop")
    before = [p.detach().clone() for p in trained[0].parameters()]
    ours()
    plain()
    for old, one, other in zip(before, *(model.parameters() for model in trained), strict=True):
        assert not torch.equal(old, one)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_masked_loop_trains_as_ste_does(tmp_path, monkeypatch):
    """With the weights that people have, which are dense and are masked in the forward pass."""
    loop, trained = loops(tmp_path, monkeypatch, "trainer.acceleration=off")
    ours, masked = loop("ste"), loop("masked_loop")
    ours()
    masked()
    used, others = (dict(model.named_parameters()) for model in trained)
    plain = {
        name: name.replace("parametrizations.", "").replace(".original", "") for name in others
    }
    assert {*plain.values()} == used.keys()
    sparse = [name for name in others if name.endswith(".original")]
    assert len(sparse) == 8
    for name, other in others.items():
        if name in sparse:
            other = hard_threshold(other.detach(), Pattern(2, 4))
        # a gradient that is nearly 0 may have either sign, and so may Adam's first step
        off = (used[plain[name]] - other).abs() > 1e-4 * other.abs() + 1e-6
        assert float(off.float().mean()) < 1e-3, name


@pytest.mark.parametrize("ratio", ["2:8", "2:2:8"])
@pytest.mark.parametrize(("shape", "dim"), [((6, 16), 1), ((16, 6), 0), ((8, 16, 3, 3), 1)])
def test_the_mask_of_the_masked_loop(shape, dim, ratio):
    torch.manual_seed(0)
    weight, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    pruned = train.TopK(Pattern.parse(ratio), dim)(weight)
    pruned.backward(upstream)
    assert torch.equal(pruned, hard_threshold(weight.detach(), ratio, dim))
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt_512", 19),
        ("gpt2", 124),
        # embeddings, positions, and twelve matrices of 4096 x 4096 in each of two blocks
        ("gpt_4096", 445),
        ("vit_large", 304),
        ("resnet18", 11.7),
    ],
)
def test_the_networks_are_what_their_names_say(name, millions, tmp_path):
    config = options.composed(tmp_path, ["recipe=dense", *options.NETWORKS[name]])
    keys = config.dataset.values()
    inputs = {key: keys[key] for key in ("vocabulary", "context") if key in keys}
    if side := keys.get("side"):
        inputs = {"shape": (3, side, side), "classes": 1000}
    with torch.device("meta"):
        model = models.build(config.model.mapping(), inputs)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)
