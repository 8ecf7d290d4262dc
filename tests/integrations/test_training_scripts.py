"""Training scripts of other projects, with three lines more. They are not part of nmrun: tests of a
script whose folder is not named in the environment are skipped.

    NMRUN_NANOGPT=.../nanoGPT NMRUN_TORCHVISION=.../vision/references/classification \
        python -m pytest tests/integrations/test_training_scripts.py -m ""
"""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model
from training import bits

import nmrun

pytestmark = pytest.mark.minutes
DENSE_FIRST = {"asp": ", prune_at=0.5", "step": ", switch=0.5"}


def copied(variable: str, folder: Path) -> Path:
    """A copy of the folder that an environment variable names."""
    source = os.environ.get(variable)
    if not source:
        pytest.skip(f"{variable} names no folder with the script")
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git", "data", "assets"))
    return folder


def patch(script: Path, after_optimizer: list[str]) -> None:
    """Add the import, lines after the statement that makes the optimizer, and ``finalize`` after
    the last loop beside it.
    """
    text = script.read_text()
    lines = text.splitlines()
    tree = ast.parse(text)
    bodies = [tree.body, *(n.body for n in ast.walk(tree) if isinstance(n, ast.FunctionDef))]
    body = next(body for body in bodies if any(map(makes_optimizer, body)))
    statement = next(node for node in body if makes_optimizer(node))
    loop = [node for node in body if isinstance(node, ast.For | ast.While)][-1]
    indent = " " * statement.col_offset
    lines[loop.end_lineno : loop.end_lineno] = [f"{indent}handle.finalize()"]
    lines[statement.end_lineno : statement.end_lineno] = [indent + line for line in after_optimizer]
    first = next(i for i, line in enumerate(lines) if line.startswith("import "))
    lines[first:first] = ["import nmrun"]
    script.write_text("\n".join(lines) + "\n")


def makes_optimizer(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return False
    names = [t for n in ast.walk(node) if isinstance(n, ast.Assign) for t in n.targets]
    return any(isinstance(name, ast.Name) and name.id == "optimizer" for name in names)


PRELUDE = """
import argparse, runpy, sys, types
import torch
try:
    import tiktoken
except ImportError:
    sys.modules["tiktoken"] = types.ModuleType("tiktoken")  # sample.py imports it, needed or not
# torchvision's script saves its arguments, and loads them with weights_only=True
torch.serialization.add_safe_globals([argparse.Namespace])
# it shuffles by an unseeded generator: a resumed training would sum in another order
torch.utils.data.RandomSampler = torch.utils.data.SequentialSampler
sys.argv, sys.path[:0] = sys.argv[1:], [""]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(script: Path, *words: str, error: str = "") -> str:
    """Run it in its folder, to the end or to an error whose last line says so."""
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE, script.name, *words]
    paths = {**os.environ, "PYTHONPATH": str(Path(nmrun.__file__).parent.parent)}
    process = subprocess.run(command, cwd=script.parent, capture_output=True, text=True, env=paths)
    assert bool(process.returncode) == bool(error), process.stdout[-1000:] + process.stderr[-3000:]
    assert error in process.stderr
    return process.stdout


# --- nanoGPT ---------------------------------------------------------------------------------------

STEPS, VOCABULARY = 12, 64
GPT: dict[str, Any] = {
    "dataset": "one", "device": "cpu", "dtype": "float32", "compile": False, "n_layer": 2,
    "n_head": 2, "n_embd": 32, "block_size": 16, "batch_size": 4, "gradient_accumulation_steps": 3,
    "max_iters": STEPS, "lr_decay_iters": STEPS, "warmup_iters": 2, "eval_interval": 4,
    "eval_iters": 2, "learning_rate": 0.01, "min_lr": 0.001,
}  # fmt: skip


def nanogpt(folder: Path, recipe: str = "", pattern: str = "2:4") -> Path:
    """The script, patched if there is a recipe, and its data: one row, so that all batches are the
    same, after a resume too.
    """
    script = copied("NMRUN_NANOGPT", folder) / "train.py"
    options = DENSE_FIRST.get(recipe, "")
    sparsify = f"handle = nmrun.sparsify(model, optimizer, '{recipe}', '{pattern}', lr_decay_iters{options})"
    if recipe == "step":
        patch(script, ["optimizer = nmrun.optim.AdamW(optimizer.param_groups)", sparsify])
    elif recipe:
        patch(script, [sparsify])
    data = folder / "data" / "one"
    data.mkdir(parents=True)
    row = np.random.default_rng(0).integers(0, VOCABULARY, GPT["block_size"] + 1)
    for split in ("train", "val"):
        row.astype(np.uint16).tofile(data / f"{split}.bin")
    letters = "\n" + "".join(chr(63 + i) for i in range(1, VOCABULARY))
    numbers = {letter: i for i, letter in enumerate(letters)}
    meta = {"vocab_size": VOCABULARY, "itos": dict(enumerate(letters)), "stoi": numbers}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    return script


def gpt(script: Path, error: str = "", **changes: Any) -> dict[str, Any]:
    """Run it, and return its checkpoint, which is of the last evaluation."""
    words = [f"--{key}={value}" for key, value in {**GPT, **changes}.items()]
    run(script, *words, error=error)
    state: dict[str, Any] = torch.load(script.parent / "out" / "ckpt.pt", weights_only=True)
    return state


def clock(state: dict[str, Any]) -> int:
    step: int = state["optimizer"]["param_groups"][0]["nmrun"]["state"]["step"]
    return step


@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste", "step"])
def test_nanogpt_resumes_with_the_same_bits_and_samples(recipe, tmp_path):
    script = nanogpt(tmp_path / "gpt", recipe)
    whole = gpt(script)
    assert clock(whole) == whole["iter_num"] == STEPS
    assert whole["best_val_loss"] < 0.8 * np.log(VOCABULARY)
    assert [g["weight_decay"] for g in whole["optimizer"]["param_groups"]] == [0.1, 0.0]
    for stop in (4, 8):  # in and after the dense phase of those that have one
        dense = stop == 4 and recipe in DENSE_FIRST
        middle = gpt(script, "ended in a dense phase" if dense else "", max_iters=stop)
        assert clock(middle) == middle["iter_num"] == stop
        weights = middle["model"]
        assert weights.keys() == whole["model"].keys()
        assert torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
        assert (weights["lm_head.weight"] != 0).all()
        layers = [w for name, w in weights.items() if ".h." in name and w.ndim == 2]
        is_sparse = [bool(((w.view(-1, 4) != 0).sum(1) <= 2).all()) for w in layers]
        assert is_sparse == [not dense] * 8
        words = ("--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=20")
        sample = run(script.with_name("sample.py"), *words).split("...\n")[-1]
        assert len(sample.rsplit("\n---", 1)[0]) == len("\n") + 20
        again = gpt(script, init_from="resume")
        assert bits(again["model"]) == bits(whole["model"])
        assert bits(again["optimizer"]) == bits(whole["optimizer"])


def test_nanogpt_with_nothing_to_prune_is_as_it_was(tmp_path):
    stock = gpt(nanogpt(tmp_path / "stock"))
    ours = gpt(nanogpt(tmp_path / "ours", "sr_ste", "4:4"))
    assert bits(ours["model"]) == bits(stock["model"])


@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
def test_nanogpt_compiled_trains_the_same(recipe, tmp_path):
    script = nanogpt(tmp_path / "gpt", recipe)
    checkpoints = [gpt(script, compile=compiled) for compiled in (False, True)]
    assert clock(checkpoints[1]) == STEPS
    torch.testing.assert_close(checkpoints[1]["best_val_loss"], checkpoints[0]["best_val_loss"])
    for name, weight in checkpoints[0]["model"].items():
        compiled = checkpoints[1]["model"][f"_orig_mod.{name}"]
        assert torch.equal(compiled == 0, weight == 0), name
        torch.testing.assert_close(compiled, weight, rtol=1e-2, atol=1e-3, msg=name)


# --- torchvision -----------------------------------------------------------------------------------

CLASSES, EPOCHS = 5, 4


def torchvision(folder: Path, recipe: str) -> Path:
    """The patched script, and images of one colour each, which no augmentation changes."""
    script = copied("NMRUN_TORCHVISION", folder) / "train.py"
    options = DENSE_FIRST.get(recipe, "")
    patch(
        script,
        [f"handle = nmrun.sparsify(model, optimizer, '{recipe}', '2:4', args.epochs{options})"],
    )
    for split in ("train", "val"):
        for i in range(CLASSES):
            place = folder / "images" / split / str(i)
            place.mkdir(parents=True)
            Image.new("RGB", (40, 40), (50 * i, 255 - 50 * i, 20 * i)).save(place / "image.png")
    return script


@pytest.mark.parametrize(
    ("optimizer", "recipe"), [("sgd", "sr_ste"), ("rmsprop", "s_ste"), ("adamw", "asp")]
)
def test_torchvision_s_script_resumes_with_the_same_bits(optimizer, recipe, tmp_path):
    script = torchvision(tmp_path / "classification", recipe)
    sizes = ("--train-crop-size=32", "--val-resize-size=32", "--val-crop-size=32")
    words = (
        "--data-path=images", "--output-dir=out", "--model=shufflenet_v2_x0_5", "--device=cpu",
        "--workers=0", "--batch-size=5", f"--epochs={EPOCHS}", f"--opt={optimizer}", "--lr=0.001",
        "--lr-step-size=2", "--norm-weight-decay=0", "--clip-grad-norm=1", *sizes,
    )  # fmt: skip
    run(script, *words)
    saved = [
        torch.load(script.parent / "out" / f"model_{i}.pth", weights_only=False)
        for i in range(EPOCHS)
    ]
    plain = get_model("shufflenet_v2_x0_5", num_classes=CLASSES)
    for epoch, state in enumerate(saved):
        assert clock(state) == epoch + 1
        plain.load_state_dict(state["model"])
        if recipe != "asp" or epoch >= 2:
            nmrun.sparsity.check_nm(plain, "2:4", exclude=None)
    for stop in (2, 0):  # after ASP's dense phase, and in it
        run(script, *words, f"--resume=out/model_{stop}.pth")
        again = torch.load(script.parent / "out" / "checkpoint.pth", weights_only=False)
        assert clock(again) == EPOCHS
        assert bits(again["model"]) == bits(saved[-1]["model"])
        assert bits(again["optimizer"]) == bits(saved[-1]["optimizer"])
