"""Optical flow: files in the layouts of Sintel and FlyingChairs, the sequence loss and the end-point
error by hand.
"""

from __future__ import annotations

import copy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError
from nmrun.lab import models, tasks
from nmrun.lab.data import generated_motion
from nmrun.lab.tasks.flow import Flow, flows, sequence_loss
from nmrun.lab.train import runner
from nmrun.lab.words.identity import run_folder
from nmrun.sparsity.select import candidates

CPU = torch.device("cpu")
SMALL = ("model=raft_small", "model.updates=2", "model.evaluated_updates=2")
MOTION = ("dataset=generated_motion", "dataset.size=6", *SMALL)


def task(tmp_path: Path, *overrides: str) -> Flow:
    found: Any = tasks.build(config(tmp_path, "trainer.batch_size=2", *overrides), CPU)
    return found


def write_flo(file: Path, flow: np.ndarray) -> None:
    """Middlebury's format: the number 202021.25, width and height, then x and y of each pixel."""
    height, width = flow.shape[1:]
    head = struct.pack("<fii", 202021.25, width, height)
    file.write_bytes(head + flow.transpose(1, 2, 0).astype("<f4").tobytes())


def sintel(place: Path, scenes: int = 4, side: int = 128) -> Any:
    """Generated pairs as scenes of two frames in Sintel's layout."""
    moved = generated_motion.Moved(scenes, side, 0)
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


def of_sintel(tmp_path: Path, *overrides: str) -> Flow:
    words = (f"dataset.path={tmp_path}", "dataset.workers=0", "trainer.batch_size=1")
    return task(tmp_path, "dataset=sintel", *words, *SMALL, *overrides)


# --- data -----------------------------------------------------------------------------------------


def test_generated_pixels_are_where_their_flow_says() -> None:
    """But for what the square covers."""
    for first, second, flow in generated_motion.Moved(5, 64, 1).pairs:
        y, x = np.mgrid[:64, :64]
        to_x, to_y = (x + flow[0]).astype(int), (y + flow[1]).astype(int)
        inside = (to_x >= 0) & (to_x < 64) & (to_y >= 0) & (to_y < 64)
        same = (second[to_y % 64, to_x % 64] == first).all(2)
        corner = flow[:, 0, 0]
        front = (flow != corner[:, None, None]).any(0)
        assert same[front & inside].all()
        assert same[inside].mean() > 0.6
        assert front.any() or (flow == corner[:, None, None]).all()


def test_sintels_layout_gives_what_was_written(tmp_path: Path) -> None:
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
                torch.equal(given[0], torch.from_numpy(written))
                for given, written in zip(
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


def test_parts_are_cut_and_mirrored_with_their_flow(tmp_path: Path) -> None:
    """A part is somewhere in the frame, or in the frame and its flow mirrored."""
    built = task(tmp_path, *MOTION, "dataset.crop=[64,48]")
    ways = set()
    for number in built.numbers["train"]:
        whole = built.ahead.files[-1, number][:3]
        for epoch in range(4):
            part = built.ahead.files[epoch, number][:3]
            assert [a.shape[1:] for a in part] == [(64, 48)] * 3
            found = []
            for x_sign in (1, -1):
                for y_sign in (1, -1):
                    turned = [a[:, ::y_sign, ::x_sign] for a in whole]
                    signs = np.array([x_sign, y_sign], np.float32)[:, None, None]
                    turned[2] = turned[2] * signs
                    for top in range(65):
                        line = turned[0][:, top, :]
                        for left in range(81):
                            if not np.array_equal(line[:, left : left + 48], part[0][:, 0]):
                                continue
                            cut = [a[:, top : top + 64, left : left + 48] for a in turned]
                            if all(map(np.array_equal, cut, part)):
                                found.append((x_sign, y_sign))
            assert len(found) == 1
            ways.add(found[0])
    assert {(1, 1), (-1, 1)} <= ways
    plain = built.ahead.files[-1, 0]
    assert plain[0].shape == (3, 128, 128)


def test_a_rank_reads_its_own_pairs(tmp_path: Path) -> None:
    one, two = task(tmp_path, *MOTION), task(tmp_path, *MOTION)
    whole = one.micro_batches(1, 1, 2)
    (part,) = two.micro_batches(1, 1, 2, range(1, 2))
    assert [len(first) for first, *_ in whole] == [1, 1]
    assert all(map(torch.equal, part, whole[1]))


# --- loss and metric ------------------------------------------------------------------------------


def test_the_sequence_loss_by_hand() -> None:
    flow = torch.zeros(1, 2, 1, 2)
    flow[0, :, 0, 1] = torch.tensor([300.0, 300.0])  # moves by 424: does not count
    said = [torch.full((1, 2, 1, 2), value) for value in (4.0, 2.0, 1.0)]
    # of two pixels one counts, with an absolute error of 4, 2 and 1 in both directions
    expected = 0.5 * (0.8**2 * 4 + 0.8 * 2 + 1)
    torch.testing.assert_close(sequence_loss(said, flow), torch.tensor(expected))


class Says(nn.Module):
    """Says the same flow everywhere, and remembers its frames."""

    def forward(self, *frames: Tensor) -> list[Tensor]:
        self.frames = frames
        flow = torch.zeros(len(frames[0]), 2, *frames[0].shape[2:])
        flow[:, 0], flow[:, 1] = 3.0, -4.0
        return [flow]


def test_frames_are_scaled_and_their_borders_repeated() -> None:
    model, first = Says(), torch.randint(0, 256, (1, 3, 13, 18), dtype=torch.uint8)
    (said,) = flows(model, first, 255 - first)
    assert said.shape == (1, 2, 13, 18)
    given = model.frames[0]
    assert given.shape == (1, 3, 16, 24)
    torch.testing.assert_close(given[..., :13, :18], first / 255 * 2 - 1)
    assert torch.equal(given[..., 15, :18], given[..., 12, :18])
    assert torch.equal(given[..., 20], given[..., 17])
    torch.testing.assert_close(model.frames[1][..., :13, :18], -given[..., :13, :18])


def test_the_end_point_error_by_hand_and_of_shares(tmp_path: Path) -> None:
    built, model = task(tmp_path, *MOTION), Says()
    split = built.splits["test"]
    true = np.stack([split.source.pairs[row][2] for row in split.rows])
    expected = np.hypot(true[:, 0] - 3, true[:, 1] + 4).mean()
    whole = built.evaluate(model, "test")
    assert whole["end_point_error"] == pytest.approx(expected, rel=1e-5)
    shares = [built.tally(model, "test", rank, 3) for rank in range(3)]
    assert built.metrics_of("test", shares) == pytest.approx(whole)


# --- the network ----------------------------------------------------------------------------------


def test_the_networks_are_torchvisions_with_their_updates(tmp_path: Path) -> None:
    # parameters as published with torchvision's weights
    for name, count in (("raft_small", 990_162), ("raft_large", 5_257_536)):
        with torch.device("meta"):
            model = models.build({"name": name, "updates": 3, "evaluated_updates": 5}, {})
        assert sum(p.numel() for p in model.parameters()) == count
        frames = [torch.zeros(1, 3, 128, 128, device="meta")] * 2
        assert len(model.train()(*frames)) == 3
        assert len(model.eval()(*frames)) == 5
        copy.deepcopy(model)
        made = config("x", "dataset=flying_chairs", f"model={name}", "recipe=sr_ste")
        assert made.model.exclude is None
        assert len(list(candidates(model))) > 20


def test_a_run(tmp_path: Path) -> None:
    words = (*MOTION, "trainer.batch_size=2", "trainer.epochs=1", "trainer.limit_batches=2")
    made = config(
        tmp_path, *words, "recipe=sr_ste", "trainer.accumulate=2", "trainer.limit_evaluation=2"
    )
    result = runner.run(made, run_folder(made))
    assert result["status"] == "finished"
    assert {"test/end_point_error", "eval/loss"} <= set(result["metrics"]["final"])
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    assert len(result["sparsity"]["layers"]) > 20


# --- mistakes -------------------------------------------------------------------------------------


def test_missing_and_wrong_files_cost_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset=sintel: there is no .*Sintel.*: unpack"):
        of_sintel(tmp_path)
    (tmp_path / "Sintel" / "training" / "clean").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has no frames; unpack"):
        of_sintel(tmp_path)
    sintel_place = tmp_path / "whole"
    sintel(sintel_place)
    flow = sintel_place / "Sintel" / "training" / "flow" / "scene_1" / "frame_0001.flo"
    flow.rename(flow.with_name("frame_0007.flo"))
    with pytest.raises(ConfigError, match=r"frame_0001\.png has no flow: .*frame_0007\.flo"):
        of_sintel(tmp_path, f"dataset.path={sintel_place}")
    flow.with_name("frame_0007.flo").unlink()
    with pytest.raises(ConfigError, match="has 4 pairs of frames and 3 files of flow"):
        of_sintel(tmp_path, f"dataset.path={sintel_place}")
    words = ("dataset=flying_chairs", f"dataset.path={tmp_path}", *SMALL)
    (tmp_path / "FlyingChairs").mkdir()
    with pytest.raises(ConfigError, match=r"FlyingChairs_train_val\.txt file was not found") as got:
        task(tmp_path, *words)
    assert "\n" not in str(got.value)


def test_frames_and_flow_of_other_sizes_and_no_flow(tmp_path: Path) -> None:
    sintel(tmp_path)
    folder = tmp_path / "Sintel" / "training" / "flow"
    for file in folder.rglob("*.flo"):
        write_flo(file, np.zeros((2, 100, 90), np.float32))
    built = of_sintel(tmp_path)
    with pytest.raises(RunError, match="frames and flow are 128x128 and 128x128 and 100x90"):
        built.micro_batches(0, 0, 1)
    with pytest.raises(ConfigError, match="frames and flow are"):
        built.example()
    for file in folder.rglob("*.flo"):
        file.write_bytes(b"nothing of the kind")
    with pytest.raises(RunError, match=r"is damaged \(Magic number incorrect"):
        of_sintel(tmp_path).micro_batches(0, 0, 1)
    small = models.build({"name": "raft_small", "updates": 1, "evaluated_updates": 1}, {})
    with pytest.raises(
        ConfigError, match="frames of 128 pixels a side or more, and these have 128x64"
    ):
        small(*[torch.zeros(1, 3, 128, 64)] * 2)
    with pytest.raises(ConfigError, match="of 4 scenes that leaves none for training"):
        of_sintel(tmp_path, "dataset.val_fraction=0.5", "dataset.test_fraction=0.4")
