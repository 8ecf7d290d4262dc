"""The examples of training stacks: each runs, learns, and leaves N:M weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training import bits
from verbs import python

from examples import nanogpt

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {  # and what each needs
    "plain_loop": "torch",
    "huggingface_trainer": "accelerate",
    "trl_sft": "trl",
    "lightning_trainer": "lightning",
    "accelerate_loop": "accelerate",
    "timm_train": "timm",
}
SLOW = ("plain_loop", "trl_sft")  # the others take minutes
BY_HUGGING_FACE = {"huggingface_trainer": 8, "trl_sft": 14}  # and how many matrices are 2:4  # fmt: skip


def groups_hold(weights: dict[str, Tensor]) -> int:
    """How many matrices are 2:4 along their inputs (their outputs, for GPT-2's Conv1D)."""
    count = 0
    for name, w in weights.items():
        if w.ndim == 2 and name.endswith("weight"):
            rows = w.T if ".c_" in name and "transformer" in name else w
            count += bool(((rows.reshape(-1, 4) != 0).sum(1) <= 2).all())
    return count


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.minutes)
        for name in SCRIPTS
    ],
)
def test_an_example_runs(name, tmp_path):
    pytest.importorskip(SCRIPTS[name], reason="needs pip install '.[integrations]'")
    out = tmp_path / ("folder" if name in BY_HUGGING_FACE else "model.pt")
    process = python("-W", "ignore", "-m", f"examples.{name}", str(out), cwd=ROOT, timeout=600)
    assert process.returncode == 0, process.stderr[-2000:]
    if name in BY_HUGGING_FACE:
        from safetensors.torch import load_file

        assert groups_hold(load_file(out / "model.safetensors")) == BY_HUGGING_FACE[name]
        losses = [float(x) for x in re.findall(r"'loss': '?([\d.]+)", process.stdout)]
        assert losses[-1] < losses[0] - 0.5
        return
    state = torch.load(out, weights_only=False)
    assert groups_hold(state.get("state_dict", state)) == (8 if name == "timm_train" else 1)
    (accuracy,) = re.findall(r"accuracy\W+(0\.\d+)", process.stdout)
    assert float(accuracy) > 0.8


@pytest.mark.minutes
def test_fairseq(tmp_path):
    pytest.importorskip("fairseq", reason="needs fairseq: pip install '.[translation]'")
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [str(ROOT / "examples" / "fairseq.sh"), str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "BLEU4 = " in process.stdout
    state = torch.load(tmp_path / "saved" / "checkpoint_last.pt", weights_only=False)
    assert groups_hold(state["model"]) == 17


# --- after nanoGPT -------------------------------------------------------------------------------

SMALL = ["max_iters=12", "eval_interval=4", "lr_decay_iters=12", "batch_size=4", "block_size=16"]


def gpt(folder: Path, *words: str) -> dict[str, Any]:
    """Run it, and return its last checkpoint."""
    nanogpt.main([f"out={folder}", *SMALL, *words])
    state: dict[str, Any] = torch.load(folder / "ckpt.pt", weights_only=True)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["asp", "s_ste"])
def test_a_language_model_resumes_with_the_same_bits(recipe, tmp_path, monkeypatch):
    whole = gpt(tmp_path / "whole", f"recipe={recipe}")
    assert whole["optimizer"]["param_groups"][0]["nmrun"]["state"]["step"] == 12
    assert groups_hold(whole["model"]) == 8
    assert torch.equal(whole["model"]["lm_head.weight"], whole["model"]["wte.weight"])
    saves = torch.save
    for stop in (4, 8):  # asp prunes after step 6

        def killed(state, file, stop=stop):
            saves(state, file)
            if state["iter_num"] == stop:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch, "save", killed)
            gpt(tmp_path / "again", f"recipe={recipe}")
        again = gpt(tmp_path / "again", f"recipe={recipe}", "init_from=resume")
        assert bits(again["model"]) == bits(whole["model"])
        assert bits(again["optimizer"]) == bits(whole["optimizer"])


@pytest.mark.slow
def test_a_compiled_language_model_trains_the_same(tmp_path, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="eager"))
    runs = [gpt(tmp_path / f"{i}", f"compile={i}", "recipe=asp") for i in (0, 1)]
    assert bits(runs[0]["model"]) == bits(runs[1]["model"])


def test_a_checkpoint_in_the_middle_samples(tmp_path, capsys):
    gpt(tmp_path / "new")
    capsys.readouterr()
    nanogpt.main([f"out={tmp_path / 'new'}", "init_from=sample"])
    assert len(capsys.readouterr().out) == len("def ") + 60 + 1


def test_a_misspelt_setting_is_no_setting():
    with pytest.raises(SystemExit, match="max_iter: there is no such setting"):
        nanogpt.main(["max_iter=5"])
