"""Images with instances: COCO's files, what a network is told of them, and average precision by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config, result_of, resumed
from torch import Tensor, nn

pytest.importorskip("pycocotools")
from nmrun.lab import tasks
from nmrun.lab.tasks.items import Split
from nmrun.lab.words.identity import run_folder
from nmrun.papers.detection import data
from nmrun.papers.detection.task import Detection, coco_detections, precision

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CPU = torch.device("cpu")
SMALL = (
    *("model=mask_rcnn", "model.backbone=resnet18", "model.width=8", "model.regions=8"),
    *("model.min_size=32", "model.max_size=32", "model.anchors=[4,8,16,32,64]"),
)
SHAPES = ("dataset=generated_shapes", "dataset.size=8", "dataset.resolution=32", *SMALL)


def task(tmp_path: Path, *overrides: str) -> Detection:
    words = ("trainer.batch_size=4", *overrides)
    built: Any = tasks.build(config(tmp_path, *words), CPU)
    return built


def write(place: Path, sides: tuple[int, ...] = (30, 20, 26, 41)) -> dict[str, Any]:
    """A data set in COCO's layout with an image of every width, and its training annotations: a
    full box of category 7 at (3, 4) to (11, 10), and a crowd of category 90 that is not learned.
    """
    for name in ("train2017", "val2017"):
        (place / name).mkdir(parents=True)
        dataset: dict[str, list[Any]] = {"images": [], "annotations": []}
        for number, width in enumerate(sides):
            pixels = np.random.default_rng([number, len(name)]).integers(0, 256, (24, width, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(place / name / f"{number}.png")
            image = {"id": 10 + number, "file_name": f"{number}.png", "height": 24, "width": width}
            dataset["images"].append(image)
            corners = [3, 4, 11, 4, 11, 10, 3, 10]
            common = {"image_id": 10 + number, "segmentation": [corners], "area": 48}
            box = {"bbox": [3, 4, 8, 6], **common}
            dataset["annotations"] += [
                {"id": 2 * number + 1, "category_id": 7, "iscrowd": 0, **box},
                {"id": 2 * number + 2, "category_id": 90, "iscrowd": 1, **box},
            ]
        dataset["categories"] = [{"id": 90, "name": "b"}, {"id": 7, "name": "a"}]
        (place / "annotations").mkdir(exist_ok=True)
        (place / "annotations" / f"instances_{name}.json").write_text(json.dumps(dataset))
    return json.loads((place / "annotations" / "instances_train2017.json").read_text())


def coco(tmp_path: Path, *overrides: str) -> Detection:
    words = (f"dataset.path={tmp_path / 'coco'}", "dataset.workers=0", "dataset.held_out=0.25")
    return task(tmp_path, "dataset=coco", *words, *overrides, *SMALL, "trainer.batch_size=3")


class Recorder(nn.Module):
    """Remembers what it is told, and answers as a detector does."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        self.images, self.targets = images, targets
        return {"a": torch.tensor(1.5), "b": torch.tensor(2.0)}


# --- what a network is told -----------------------------------------------------------------------


def test_a_network_is_told_each_image_in_its_size_with_what_is_learned(tmp_path):
    write(tmp_path / "coco")
    built, network = coco(tmp_path, "dataset.flip=false"), Recorder()
    assert {name: len(split.rows) for name, split in built.splits.items()} == {
        "train": 3,
        "val": 1,
        "test": 4,
    }
    assert built.inputs == {"categories": 2}
    (batch,) = built.micro_batches(0, 0, 1)
    assert float(built.loss(network, batch)) == 3.5
    expected = torch.zeros(24, 41, dtype=torch.uint8)
    expected[4:10, 3:11] = 1
    seen = set()
    for image, target in zip(network.images, network.targets or [], strict=True):
        width = image.shape[2]
        seen.add(width)
        number = [30, 20, 26, 41].index(width)
        with Image.open(tmp_path / "coco" / "train2017" / f"{number}.png") as file:
            pixels = torch.from_numpy(np.array(file)).permute(2, 0, 1)
        assert torch.equal(image, pixels.float() / 255)
        assert target["boxes"].tolist() == [[3, 4, 11, 10]]
        assert target["labels"].tolist() == [1]  # category 7 comes before 90
        assert torch.equal(target["masks"], expected[None, :, :width])
    assert len(seen) == 3


def test_generated_boxes_and_masks_are_those_of_the_shapes(tmp_path):
    """Shapes are brighter than the noise behind them, and boxes end where masks end."""
    built, network = task(tmp_path, *SHAPES), Recorder()
    for epoch in range(3):  # mirrored and not
        for batch in built.micro_batches(epoch, 0, 2):
            built.loss(network, batch)
            for image, target in zip(network.images, network.targets or [], strict=True):
                bright = (255 * image).round().amin(0) >= 110
                assert torch.equal(target["masks"].sum(0).bool(), bright)
                for box, mask in zip(target["boxes"], target["masks"], strict=True):
                    y, x = mask.nonzero().unbind(1)
                    ends = [x.min(), y.min(), x.max() + 1, y.max() + 1]
                    assert box.tolist() == [float(end) for end in ends]


# --- average precision ----------------------------------------------------------------------------


def squares() -> Split:
    """Two images of 100 pixels with a square of 40 each."""
    images = [{"id": n, "file_name": "", "height": 100, "width": 100} for n in (1, 2)]
    instances = [
        {
            "id": n,
            "image_id": n,
            "category_id": 7,
            "iscrowd": 0,
            "area": 1600,
            "bbox": [10, 20, 40, 40],
            "segmentation": [[10, 20, 50, 20, 50, 60, 10, 60]],
        }
        for n in (1, 2)
    ]
    dataset = {"images": images, "annotations": instances, "categories": [{"id": 7, "name": "x"}]}
    return Split(data.Shapes(np.zeros((2, 100, 100, 3), np.uint8), dataset), [0, 1])


def square(image: int, left: int, score: float) -> dict[str, Any]:
    """A detection of 40 x 40 pixels at (left, 20)."""
    mask = torch.zeros(1, 1, 100, 100)
    mask[..., 20:60, left : left + 40] = 0.9
    detections = {
        "boxes": torch.tensor([[left, 20.0, left + 40, 60]]),
        "labels": torch.tensor([1]),
        "scores": torch.tensor([score]),
        "masks": mask,
    }
    (one,) = coco_detections(image, detections, [7])
    return one


def test_average_precision_by_hand():
    split = squares()
    assert set(precision(split, []).values()) == {0.0}
    both = precision(split, [square(1, 10, 0.9), square(2, 10, 0.8)])
    assert both == {
        **dict.fromkeys(("box_ap", "box_ap50", "box_ap75"), pytest.approx(1)),
        **dict.fromkeys(("mask_ap", "mask_ap50", "mask_ap75"), pytest.approx(1)),
    }
    # recall 1/2 with precision 1: 51 of the 101 recalls from 0 to 1
    half = precision(split, [square(1, 10, 0.9)])
    assert half["box_ap"] == half["mask_ap"] == pytest.approx(51 / 101)
    # shifted by 8 of 40: the intersection is 32/48 of the union, found at 0.50 to 0.65 of ten
    shifted = precision(split, [square(1, 18, 0.9), square(2, 18, 0.8)])
    for kind in ("box", "mask"):
        assert shifted[f"{kind}_ap"] == pytest.approx(0.4)
        assert shifted[f"{kind}_ap50"] == pytest.approx(1)
        assert shifted[f"{kind}_ap75"] == 0
    # one image alone, where a wrong one comes first: precision 1/2 at every recall
    first = Split(split.source, [0])
    wrong = precision(first, [square(1, 60, 0.9), square(1, 10, 0.8)])
    assert wrong["box_ap"] == pytest.approx(0.5)


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_and_one_that_goes_on(tmp_path):
    words = (*SHAPES, "trainer.batch_size=4", "trainer.epochs=2", "trainer.accumulate=2")
    words = (*words, "recipe=sr_ste", "optimizer=sgd", "trainer.limit_evaluation=4")
    resumed(tmp_path, *words, steps=(3,))
    cfg = config(tmp_path / "alone", *words)
    result = result_of(run_folder(cfg))
    names = {f"{kind}_ap{at}" for kind in ("box", "mask") for at in ("", "50", "75")}
    assert {f"test/{name}" for name in names} <= set(result["metrics"]["final"])
    assert result["metric"] == "box_ap"
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    assert result["flops"]["training_arithmetic"] < result["flops"]["training_dense"]
