"""Record what a commit computes, and hold another commit to it: a restructuring changes no bit.

``python benchmarks/recordings.py record FILE`` in the old checkout, ``... check FILE`` in the new
one, on the same machine. Recorded are SHA-256 of the final and dense weights of every recipe under
four optimizers at two ratios, the ids, metrics and weights of runs over all tasks that need no
data from elsewhere, and the tables of the committed results. ``check`` prints what differs and
exits with 1. Only the public API and the command line are used, so that both commits can run it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout that this file lies in

import nmrun  # noqa: E402
from nmrun import recipes  # noqa: E402

STEPS = 12
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: nmrun.optim.Adam(model.parameters(), lr=1e-2),
    "adamw": lambda model: nmrun.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
}
SMALL = "trainer.limit_batches=6 trainer.epochs=3 trainer.threads=1 track=local"
RUNS = [
    *(f"recipe={name} sparsity=2:4 {SMALL}" for name in recipes.RECIPES),
    *(f"recipe={name} sparsity=1:8 optimizer=adamw {SMALL}" for name in ("step", "sr_ste", "asp")),
    f"recipe=sr_ste sparsity=2:8 optimizer=sgd optimizer.lr=0.1 {SMALL}",
    f"recipe=step sparsity=2:4 recipe.switch=0.3 trainer.evaluate=both {SMALL}",
    f"recipe=sr_ste sparsity=4:2:8 {SMALL}",
    f"recipe=sr_ste sparsity=2:4 trainer.accumulate=2 trainer.clip=1 {SMALL}",
    f"recipe=sr_ste sparsity=2:4 trainer.average=0.9 {SMALL}",
    f"recipe=t_sr_ste sparsity=2:4 model=mlp trainer.mvue=2:4 {SMALL}",
    f"recipe=asp sparsity=2:4 model=mlp recipe.permute=true {SMALL}",
    f"recipe=s_ste sparsity=2:4 model=resnet20 model.depth=8 {SMALL}",
    f"dataset=stdlib_text model=gpt_tiny recipe=step sparsity=2:4 {SMALL}",
    f"dataset=stdlib_text model=gpt_tiny recipe=s_ste sparsity=1:4 schedule=cosine {SMALL}",
    f"dataset=copy_reverse model=seq2seq_tiny recipe=sr_ste sparsity=2:4 {SMALL}",
    f"dataset=generated_text model=text_encoder recipe=sr_ste sparsity=2:4 {SMALL}",
    f"dataset=generated_questions model=text_encoder recipe=ste sparsity=2:4 {SMALL}",
]
CLOCK = ("seconds", "environment", "files", "output_dir", "seal", "sha256")


def digest(state: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes."""
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        total.update(name.encode() + str(value.dtype).encode())
        total.update(value.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def trained(recipe: str, optimizer: str, pattern: str) -> str:
    """Digests of a small network after some steps, or the refusal."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    try:
        handle = nmrun.sparsify(
            model, (made := OPTIMIZERS[optimizer](model)), recipe, pattern, total_steps=STEPS
        )
        for step in range(STEPS):
            noise = torch.Generator().manual_seed(step)
            images = torch.randn(8, 3, 8, 8, generator=noise)
            labels = torch.randint(10, (8,), generator=noise)
            nn.functional.cross_entropy(model(images), labels).backward()
            made.step()
            made.zero_grad()
        with handle.dense_weights():
            dense = digest(model.state_dict())
        handle.finalize()
        return f"{digest(model.state_dict())} {dense}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def command(words: str) -> tuple[int, str]:
    """Exit status and output of a command line, run in this process."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["nmrun"]
    module, _, main = script.partition(":")  # where an older or newer commit has it
    said = io.StringIO()
    before, sys.argv = sys.argv, ["nmrun", *shlex.split(words)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status = getattr(importlib.import_module(module), main)()
            except SystemExit as end:
                status = int(end.code or 0)
    finally:
        sys.argv = before
    return status, said.getvalue()


def run(words: str) -> dict[str, Any]:
    """Folder, result without clocks and weights of a run, or what the command said."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        status, said = command(f"{words} output_dir={folder}")
        results = sorted(Path(folder).rglob("result.json"))
        if status or len(results) != 1:
            return {"status": status, "said": said.strip().splitlines()[-1:]}
        result = json.loads(results[0].read_text())
        return {
            "folder": str(results[0].parent.relative_to(folder)),
            "metrics": {
                key: value
                for key, value in result.get("metrics", {}).items()
                if "second" not in key and "memory" not in key
            },
            "id": result.get("id"),
            "weights": digest(load_file(results[0].parent / "model.safetensors")),
        }


def everything(only: str) -> Iterator[tuple[str, Any]]:
    """What is recorded, by name."""
    for recipe in recipes.RECIPES:
        for optimizer in OPTIMIZERS:
            for pattern in ("2:4", "1:8"):
                name = f"sparsify {recipe} {optimizer} {pattern}"
                if only in name:
                    yield name, trained(recipe, optimizer, pattern)
    for words in RUNS:
        if only in f"run {words}":
            yield f"run {words}", run(words)
    for results in sorted((ROOT / "docs/results").glob("*.csv")):
        for style in ("markdown", "latex"):
            name = f"table {results.name} {style}"
            if only in name:
                yield name, command(f"table {results} --format {style}")[1].replace(str(ROOT), "")


def holds(before: Any, now: Any) -> bool:
    """Whether all that was recorded is there unchanged; a newer commit may tell more."""
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and holds(value, now[key]) for key, value in before.items())
    return bool(before == now)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("do", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="what has this text in its name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.do == "record":
        recorded = dict(everything(options.only))
        options.file.write_text(json.dumps(recorded, indent=1))
        print(f"{len(recorded)} recorded in {options.file}")
        return 0
    recorded, others, same = json.loads(options.file.read_text()), 0, 0
    for name, value in everything(options.only):
        before = recorded.get(name, "not recorded")
        if holds(before, json.loads(json.dumps(value))):
            same += 1
        else:
            others += 1
            print(f"differs: {name}\n  before {before}\n  now    {value}")
    print(f"{same} the same, {others} not")
    return int(others > 0)


if __name__ == "__main__":
    raise SystemExit(main())
