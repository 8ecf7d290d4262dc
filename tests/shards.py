"""What each of two processes does in test_fsdp.py: train on shards what one process trains, go on,
stop, and compare notes.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import one_rank
import torch
from runs import config, signal_after
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train import checkpoint, runner
from nmrun.lab.train.loop import Loop

OPTIONS = (
    "trainer.clip=0.5",
    "trainer.epochs=3",
    "model.exclude=[stem,head]",
    "model.channels=[8,7,8]",
    "sparsity.pad=true",
)
VIT = (
    "model=vit_tiny",
    "model.layers=1",
    "model.width=8",
    "model.heads=1",
    "trainer.clip=0.5",
    "trainer.epochs=2",
)
MLP = ("recipe=sr_ste", "model=mlp", "model.hidden=[32,16]", "trainer.epochs=2")
RECIPES = ("ste", "s_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric")
CASES: dict[str, tuple[str, ...]] = {
    "dense": ("recipe=dense", *OPTIONS),
    **{name: (f"recipe={name}", *OPTIONS) for name in RECIPES},
    "sr_ste": (
        "recipe=sr_ste",
        "recipe.decay=0.1",
        "trainer.accumulate=2",
        "trainer.evaluate=both",
        *OPTIONS,
    ),
    "masked": ("recipe=ste_periodic", "recipe.interval=3", *OPTIONS),
    "asp": ("recipe=asp", *OPTIONS),
    "asp at once": ("recipe=asp", "recipe.prune_at=0.0", "optimizer=sgd", *OPTIONS),
    "step": ("recipe=step", "recipe.switch=0.5", "recipe.decay=0.1", *OPTIONS),
    "autoswitch": (
        "recipe=step",
        "recipe.t_max=0.9",
        "optimizer.betas=[0.9,0.5]",
        "optimizer.eps=1e-4",
        *OPTIONS,
    ),
    "average": ("recipe=sr_ste", "trainer.average=2", *OPTIONS),
    "budget": ("recipe=step", "recipe.switch=0.5", "trainer.budget=flops:dense", *OPTIONS),
    "fp8": (*MLP, "trainer.fp8=true"),
    "vit": ("recipe=sr_ste", "optimizer=adamw", *VIT),
}
RESUMED = ("asp", "step", "average")
ESTIMATED = ("recipe=ste", *MLP[1:], "trainer.mvue='2:4'")  # by random numbers of each rank's own
STOP = 6  # after the middle, where both have begun to prune


class Stored(nn.Module):
    """A layer whose weight is stored (in, out), as Hugging Face's ``Conv1D``."""

    def __init__(self, inputs: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(inputs, nf) / 3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Stored.__name__ = "Conv1D"


class Odd(nn.Module):
    """A transposed weight, a row that one rank has alone, a tied and a frozen parameter, and
    running statistics.
    """

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), Stored(8, outputs), nn.Linear(outputs, 1)])
        self.layers[0].weight = self.first.weight
        self.layers[2].bias.requires_grad_(False)
        self.register_buffer("hidden", torch.arange(3.0) + 1, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.norm(self.first(x)).relu()).relu()
        return self.layers[2](self.layers[1](x).relu())


def run(
    output_dir: Path | str, case: str, *overrides: str, stop: int | None = None
) -> dict[str, Any]:
    """Train in this process, one of several or not; ``stop`` as by a signal after so many steps."""
    cfg = config(output_dir, *CASES[case], *overrides)
    with signal_after(stop, signal.SIGTERM) if stop else nullcontext():
        return runner.run(cfg, run_folder(cfg))


def check_shards(loop: Loop) -> None:
    """No rank holds a whole weight, moment or mask; a packed first mask is a bit a weight."""
    for parameter in loop.model.parameters():
        assert isinstance(parameter, DTensor)
        counts = ranks.gathered(parameter._local_tensor.numel())
        assert sum(counts) == parameter.numel()
        assert max(counts) - min(counts) <= parameter.numel() / parameter.shape[0]
        for key, value in loop.parts.optimizer.state.get(parameter, {}).items():
            if key == "nmrun_first_mask":
                assert value.numel() == -(-parameter.numel() // 8)
            elif value.dim():
                assert value.shape == parameter.shape
                assert value._local_tensor.shape == parameter._local_tensor.shape
    for weight in loop.handle.sparse:
        assert weight.dense.numel() < weight.shape.numel()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_odd() -> None:
    """A model by hand: the same steps as in one process, its state dicts those of one process."""
    from nmrun.lab.train import fsdp
    from nmrun.lab.train.weights import Replicated

    def odd() -> Odd:
        torch.manual_seed(1)
        return Odd()

    alone, model = odd(), fsdp.built(odd)
    assert all(p.is_meta != ranks.leads() for p in model.parameters())
    fsdp.shard(model, torch.device("cpu"), {"layers.1.weight"})
    assert model.first.weight is model.layers[0].weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(full(tensor), alone.state_dict()[name]), name
    assert torch.equal(model.hidden, alone.hidden)
    batches = torch.randn(5, 8, 8)
    runs = []
    for each in (alone, model):
        optimizer = nmrun.optim.Adam([p for p in each.parameters() if p.requires_grad], lr=0.05)
        handle = nmrun.sparsify(
            each, optimizer, "sr_ste", "2:4", decay=0.1, exclude="first|layers.0"
        )
        runs.append((each, optimizer, handle))
    sharded, whole = fsdp.Sharded(*runs[1]), Replicated(*runs[0])
    assert [w.name for w in runs[1][2].sparse] == ["layers.1.weight"]
    assert runs[1][2].sparse[0].dense.shape == (8, 3)
    for each, *_ in runs:
        each.norm.eval()  # statistics of a whole batch are those of no half
    for batch in batches:
        for each, optimizer, _ in runs:
            part = batch if each is alone else batch[4 * ranks.rank() :][:4]
            each(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    saved, final = sharded.state_dict(), sharded.final_state_dict()
    for expected, parts in (
        (whole.state_dict()["model"], saved["model"]),
        (whole.final_state_dict(), final),
    ):
        assert list(parts) == list(expected)
        gathered = sharded.gather(parts)
        assert list(gathered) == (list(expected) if ranks.leads() else [])
        for name, tensor in gathered.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)
    moments = whole.state_dict()["optimizer"]["state"]
    assert moments.keys() == saved["optimizer"]["state"].keys()
    for number, entries in moments.items():
        torch.testing.assert_close(
            {key: full(value) for key, value in saved["optimizer"]["state"][number].items()},
            entries,
        )
    state = whole.state_dict()
    state["model"]["norm.running_mean"] = torch.ones(8)
    sharded.load_state_dict(state)
    assert model.norm.running_mean.tolist() == [1.0] * 8
    for weight, other in zip(runs[1][2].sparse, runs[0][2].sparse, strict=True):
        assert torch.equal(weight.whole(weight.dense), other.dense)
    model.norm.running_mean += ranks.rank()
    ranks.share_statistics(model)
    assert model.norm.running_mean.tolist() == [1.0] * 8

    scaled = nn.Sequential(nn.Linear(8, 8))
    scaled.scale = nn.Parameter(torch.ones(()))
    for wrong, complaint in ((Odd(outputs=5), "uneven sharding"), (scaled, "scalar parameters")):
        try:
            fsdp.shard(wrong, torch.device("cpu"), {"layers.1.weight"})
        except ConfigError as error:
            assert complaint in str(error)  # noqa: PT017
        else:
            raise AssertionError(complaint)


def check_resharded(folder: Path) -> None:
    """What one rank has saved in shards, two have in theirs."""
    from nmrun.lab.train import fsdp

    model = nn.ParameterDict({n: torch.zeros(shape) for n, shape in one_rank.SHAPES.items()})
    fsdp.shard(model, torch.device("cpu"))
    state, notes = checkpoint.load_last(folder)
    assert not notes
    parts = checkpoint.complete(folder, state, model)["model"]
    for name, tensor in one_rank.values(2).items():
        assert parts[name].to_local().shape == model[name].to_local().shape
        assert torch.equal(full(parts[name]), tensor)


def killed(output_dir: str) -> None:
    """Rank 1 is killed in the middle of its second checkpoint."""
    original, calls = os.fsync, 0

    def fsync(number: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        original(number)

    if not ranks.leads():
        os.fsync = fsync
    run(output_dir, "step", "trainer.distributed=fsdp")


def main(output_dir: str) -> None:
    """``resumed`` begins with what one process has stopped; ``stopped`` is for one process to go on
    with; ``again`` is stopped and goes on in shards; ``replicas`` is stopped in shards and goes on
    without.
    """
    train = Loop.train

    def watched(loop: Loop, *args: Any) -> bool:
        done = train(loop, *args)
        if loop.strategy.in_step:
            check_shards(loop)
        return done

    Loop.train = watched
    for case in CASES:
        result = run(f"{output_dir}/together", case, "trainer.distributed=fsdp")
        assert result["status"] == "finished", (case, result)
    for case in RESUMED:
        result = run(f"{output_dir}/stopped", case, "trainer.distributed=fsdp", stop=STOP)
        assert result["status"] == "interrupted"
        result = run(f"{output_dir}/resumed", case, "trainer.distributed=fsdp")
        assert result["status"] == "finished"
        for place, kind in (("again", "fsdp"), ("replicas", "ddp")):
            run(f"{output_dir}/{place}", case, "trainer.distributed=fsdp", stop=STOP)
            result = run(f"{output_dir}/{place}", case, f"trainer.distributed={kind}")
            assert result["status"] == "finished"
    for kind in ("ddp", "fsdp"):
        cfg = config(f"{output_dir}/{kind}", *ESTIMATED, f"trainer.distributed={kind}")
        assert runner.run(cfg, run_folder(cfg))["status"] == "finished"
    check_odd()
    check_resharded(Path(output_dir) / "one")


if __name__ == "__main__":
    {"main": main, "killed": killed}[sys.argv[1]](sys.argv[2])
