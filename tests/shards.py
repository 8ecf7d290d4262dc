"""What each of two processes does in test_fsdp.py: train on shards what one process trains, go on, stop, and compare notes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from runs import config
from torch import Tensor, nn

import nmrun
from nmrun import ranks
from nmrun.config.identity import run_folder
from nmrun.errors import ConfigError
from nmrun.train import runner
from nmrun.train.loop import Loop

OPTIONS = ("trainer.clip=0.5", "trainer.epochs=3", "model.exclude=[stem,head]", "model.channels=[8,7,8]", "sparsity.pad=true")
VIT = ("model=vit_tiny", "model.layers=1", "model.width=8", "model.heads=1", "trainer.clip=0.5", "trainer.epochs=2")
RECIPES = ("ste", "s_ste", "mdgf_linear", "mdgf_exponential", "sdgf_stepwise", "sdgf_geometric", "decay_mask")
CASES: dict[str, tuple[str, ...]] = {
    "dense": ("recipe=dense", *OPTIONS),
    **{name: (f"recipe={name}", *OPTIONS) for name in RECIPES},
    "sr_ste": ("recipe=sr_ste", "recipe.decay=0.1", "trainer.accumulate=2", *OPTIONS),
    "masked": ("recipe=ste", "recipe.interval=3", "recipe.gradient=masked", *OPTIONS),
    "asp": ("recipe=asp", *OPTIONS),
    "asp at once": ("recipe=asp", "recipe.prune_at=0.0", "optimizer=sgd", *OPTIONS),
    "step": ("recipe=step", "recipe.switch=0.5", "recipe.decay=0.1", *OPTIONS),
    "autoswitch": ("recipe=step", "recipe.t_max=0.9", "optimizer.betas=[0.9,0.5]", "optimizer.eps=1e-4", *OPTIONS),
    "vit": ("recipe=sr_ste", "optimizer=adamw", *VIT),
}
RESUMED = ("asp", "step")
STOP = 6  # after the middle, where both have begun to prune


class Stored(nn.Module):
    """A layer whose weight is stored (in, out), as Hugging Face's ``Conv1D``."""

    def __init__(self, inputs: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, nf) / 3), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


Stored.__name__ = "Conv1D"


class Odd(nn.Module):
    """A transposed weight, a row that one rank has alone, a tied and a frozen parameter, and running statistics."""

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), Stored(8, outputs), nn.Linear(outputs, 1)])
        self.layers[0].weight = self.first.weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.norm(self.first(x)).relu()).relu()
        return self.layers[2](self.layers[1](x).relu())


def run(output_dir: Path | str, case: str, *overrides: str, stop: int | None = None) -> dict[str, Any]:
    """Train in this process, one of several or not; ``stop`` as by a signal after so many steps."""
    made = config(output_dir, *CASES[case], *overrides)
    train = Loop.train

    def stopped(loop: Loop, folder: Path, tracker: Any, signal: Any) -> bool:
        return train(loop, folder, tracker, lambda: loop.step == stop or signal())

    Loop.train = stopped  # type: ignore[method-assign]
    try:
        return runner.run(made, run_folder(made))
    finally:
        Loop.train = train  # type: ignore[method-assign]


def check_shards(loop: Loop) -> None:
    """No rank holds a whole weight, moment or mask."""
    for shard in loop.held.shards.values():  # type: ignore[union-attr]
        held = ranks.gathered(shard.rows.numel())
        assert sum(held) == shard.gathered.numel()
        assert max(held) - min(held) <= shard.gathered.numel() / shard.gathered.shape[0]
        moments = loop.optimizer.state.get(shard.rows, {}).values()
        assert all(value.shape in ((), shard.rows.shape) for value in moments)
    for weight in loop.handle.sparse:
        assert all(buffer.shape in ((), weight.dense.shape) for buffer in weight.projection.buffers())
        assert weight.dense.numel() < weight.shape.numel()


def check_odd() -> None:
    """A model by hand: the same steps as in one process, its state dicts those of one process."""
    from nmrun.train.sharded import Sharded

    torch.manual_seed(1)
    alone = Odd()
    model = copy.deepcopy(alone)
    batches = torch.randn(5, 8, 8)
    made = []
    for each in (alone, model):
        optimizer = nmrun.optim.Adam([p for p in each.parameters() if p.requires_grad], lr=0.05)
        handle = nmrun.sparsify(each, optimizer, "sr_ste", "2:4", decay=0.1, exclude="first|layers.0")
        made.append((each, optimizer, handle))
    sharded = Sharded(model, made[1][1], made[1][2], torch.device("cpu"))
    assert [w.name for w in made[1][2].sparse] == ["layers.1.weight"]
    assert made[1][2].sparse[0].dense.shape == (8, 3)
    for each, *_ in made:
        each.norm.eval()  # statistics of a whole batch are those of no half
    for batch in batches:
        for each, optimizer, _ in made:
            part = batch if each is alone else batch[4 * ranks.rank() :][:4]
            each(part).square().mean().backward()
            if each is model:
                sharded.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
    for whole, gathered in (
        (alone.state_dict(), sharded.state_dict()),
        (nmrun.sparsity.baked_state_dict(alone), sharded.baked_state_dict()),
    ):
        if ranks.leads():
            assert list(whole) == list(gathered)
            for name, tensor in whole.items():
                torch.testing.assert_close(gathered[name], tensor, msg=name)
    state = alone.state_dict()
    state["norm.running_mean"] = torch.full((8,), 1.0 + ranks.rank())
    sharded.load_state_dict(state)
    assert model.norm.running_mean.tolist() == [1.0] * 8  # the leader's
    model.norm.running_mean += ranks.rank()
    ranks.share_statistics(model)
    assert model.norm.running_mean.tolist() == [1.0] * 8

    scaled = nn.Sequential(nn.Linear(8, 8))
    scaled.scale = nn.Parameter(torch.ones(()))
    for odd, complaint in ((Odd(outputs=5), "5 outputs of layers.1.weight"), (scaled, "cannot cut scale")):
        optimizer = torch.optim.SGD(odd.parameters(), lr=0.1)
        handle = nmrun.sparsify(odd, optimizer, "ste", "2:4")
        try:
            Sharded(odd, optimizer, handle, torch.device("cpu"))
        except ConfigError as error:
            assert complaint in str(error)  # noqa: PT017
            assert "trainer.distributed=ddp" in str(error)  # noqa: PT017
        else:
            raise AssertionError(complaint)


def main(output_dir: str) -> None:
    """``resumed`` begins with what one process has stopped; ``stopped`` is for one process to go on with."""
    train = Loop.train

    def watched(loop: Loop, *args: Any) -> bool:
        done = train(loop, *args)
        check_shards(loop)
        return done

    Loop.train = watched  # type: ignore[method-assign]
    for case in CASES:
        result = run(f"{output_dir}/together", case, "trainer.distributed=fsdp")
        assert result["status"] == "finished", (case, result)
    for case in RESUMED:
        assert run(f"{output_dir}/stopped", case, "trainer.distributed=fsdp", stop=STOP)["status"] == "interrupted"
        assert run(f"{output_dir}/resumed", case, "trainer.distributed=fsdp")["status"] == "finished"
    check_odd()


if __name__ == "__main__":
    main(sys.argv[1])
