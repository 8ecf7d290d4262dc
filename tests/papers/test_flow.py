"""Optical flow: files in the layouts of Sintel and FlyingChairs, the sequence loss and the end-point
error by hand.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config, finished
from torch import Tensor, nn

from nmrun.lab import tasks
from nmrun.papers.flow import data
from nmrun.papers.flow.task import FlowTask, sequence_loss

CPU = torch.device("cpu")
SMALL = ("model=raft_small", "model.updates=2", "model.evaluated_updates=2")
MOTION = ("dataset=generated_motion", "dataset.size=6", *SMALL)


def task(tmp_path: Path, *overrides: str) -> FlowTask:
    built: Any = tasks.build(config(tmp_path, "trainer.batch_size=2", *overrides), CPU)
    return built


def write_flo(file: Path, flow: np.ndarray) -> None:
    """Middlebury's format: the number 202021.25, width and height, then x and y of each pixel."""
    height, width = flow.shape[1:]
    head = struct.pack("<fii", 202021.25, width, height)
    file.write_bytes(head + flow.transpose(1, 2, 0).astype("<f4").tobytes())


def sintel(place: Path, scenes: int = 4, side: int = 128) -> Any:
    """Generated pairs as scenes of two frames in Sintel's layout."""
    moved = data.Moved(scenes, side, 0)
    for number, (first, second, flow) in enumerate(moved.pairs):
        for kind in ("clean", "final", "flow"):
            folder = place / "Sintel" / "training" / kind / f"scene_{number}"
            folder.mkdir(parents=True)
            if kind == "flow":
                write_flo(folder / "frame_0001.flo", flow)
                continue
            for name, image in enumerate((first, second), 1):
                Image.fromarray(image).save(folder / f"frame_{name:04}.png")
    return moved


def of_sintel(tmp_path: Path, *overrides: str) -> FlowTask:
    words = (f"dataset.path={tmp_path}", "dataset.workers=0", "trainer.batch_size=1")
    return task(tmp_path, "dataset=sintel", *words, *SMALL, *overrides)


# --- data -----------------------------------------------------------------------------------------


def test_generated_pixels_are_where_their_flow_says():
    """But for what the square covers."""
    for first, second, flow in data.Moved(5, 64, 1).pairs:
        y, x = np.mgrid[:64, :64]
        to_x, to_y = (x + flow[0]).astype(int), (y + flow[1]).astype(int)
        inside = (to_x >= 0) & (to_x < 64) & (to_y >= 0) & (to_y < 64)
        same = (second[to_y % 64, to_x % 64] == first).all(2)
        corner = flow[:, 0, 0]
        front = (flow != corner[:, None, None]).any(0)
        assert same[front & inside].all()
        assert same[inside].mean() > 0.6
        assert front.any() or (flow == corner[:, None, None]).all()


def test_sintels_layout_gives_what_was_written(tmp_path):
    moved = sintel(tmp_path)
    built = of_sintel(tmp_path, "dataset.flip=false")
    assert {name: len(split.rows) for name, split in built.splits.items()} == {
        "train": 2,
        "val": 1,
        "test": 1,
    }
    for index in range(2):
        ((first, second, flow),) = built.micro_batches(0, index, 1)
        matches = [
            all(
                torch.equal(read[0], torch.from_numpy(written))
                for read, written in zip(
                    (first, second, flow),
                    (a.transpose(2, 0, 1), b.transpose(2, 0, 1), c),
                    strict=True,
                )
            )
            for a, b, c in moved.pairs
        ]
        assert sum(matches) == 1
    other = of_sintel(tmp_path, "dataset.rendering=both")
    assert len(other.splits["train"].rows) == 4


# --- loss and metric ------------------------------------------------------------------------------


def test_the_sequence_loss_by_hand():
    flow = torch.zeros(1, 2, 1, 2)
    flow[0, :, 0, 1] = torch.tensor([300.0, 300.0])  # moves by 424: does not count
    estimates = [torch.full((1, 2, 1, 2), value) for value in (4.0, 2.0, 1.0)]
    # of two pixels one counts, with an absolute error of 4, 2 and 1 in both directions
    expected = 0.5 * (0.8**2 * 4 + 0.8 * 2 + 1)
    torch.testing.assert_close(sequence_loss(estimates, flow), torch.tensor(expected))


class Says(nn.Module):
    """Says the same flow everywhere, and remembers its frames."""

    def forward(self, *frames: Tensor) -> list[Tensor]:
        self.frames = frames
        flow = torch.zeros(len(frames[0]), 2, *frames[0].shape[2:])
        flow[:, 0], flow[:, 1] = 3.0, -4.0
        return [flow]


def test_the_end_point_error_by_hand_and_of_shares(tmp_path):
    built, model = task(tmp_path, *MOTION), Says()
    split = built.splits["test"]
    true = np.stack([split.source.pairs[row][2] for row in split.rows])
    expected = np.hypot(true[:, 0] - 3, true[:, 1] + 4).mean()
    whole = built.evaluate(model, "test")
    assert whole["end_point_error"] == pytest.approx(expected, rel=1e-5)
    shares = [built.tally(model, "test", rank, 3) for rank in range(3)]
    assert built.metrics_of("test", shares) == pytest.approx(whole)


# --- the network ----------------------------------------------------------------------------------


def test_a_run(tmp_path):
    words = (*MOTION, "trainer.batch_size=2", "trainer.epochs=1", "trainer.limit_batches=2")
    cfg = config(
        tmp_path, *words, "recipe=sr_ste", "trainer.accumulate=2", "trainer.limit_evaluation=2"
    )
    result = finished(cfg)
    assert {"test/end_point_error", "eval/loss"} <= set(result["metrics"]["final"])
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    assert len(result["sparsity"]["layers"]) > 20


# --- mistakes -------------------------------------------------------------------------------------
