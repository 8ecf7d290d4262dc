"""Images with instances: COCO's files, what a network is told of them, and average precision by
hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config, rows, stopping
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models as theirs

pytest.importorskip("pycocotools")
from nmrun.errors import ConfigError, RunError
from nmrun.lab import models, tasks
from nmrun.lab.data import generated_shapes
from nmrun.lab.tasks.detection import Detection
from nmrun.lab.tasks.instances import found, precision
from nmrun.lab.tasks.streamed import Split
from nmrun.lab.train import runner, start
from nmrun.lab.train.loop import Loop
from nmrun.lab.words.identity import run_folder
from nmrun.sparsity.select import candidates

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CPU = torch.device("cpu")
SMALL = (
    *("model=mask_rcnn", "model.backbone=resnet18", "model.width=8", "model.regions=8"),
    *("model.min_size=32", "model.max_size=32", "model.anchors=[4,8,16,32,64]"),
)
SHAPES = ("dataset=generated_shapes", "dataset.size=8", "dataset.resolution=32", *SMALL)


def task(tmp_path: Path, *overrides: str) -> Detection:
    words = ("trainer.batch_size=4", *overrides)
    found: Any = tasks.build(config(tmp_path, *words), CPU)
    return found


def write(place: Path, sides: tuple[int, ...] = (30, 20, 26, 41)) -> dict[str, Any]:
    """A data set in COCO's layout with an image of every width, and its training annotations: a
    full box of category 7 at (3, 4) to (11, 10), and a crowd of category 90 that is not learned.
    """
    for name in ("train2017", "val2017"):
        (place / name).mkdir(parents=True)
        kept: dict[str, list[Any]] = {"images": [], "annotations": []}
        for number, width in enumerate(sides):
            pixels = np.random.default_rng([number, len(name)]).integers(0, 256, (24, width, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(place / name / f"{number}.png")
            image = {"id": 10 + number, "file_name": f"{number}.png", "height": 24, "width": width}
            kept["images"].append(image)
            corners = [3, 4, 11, 4, 11, 10, 3, 10]
            common = {"image_id": 10 + number, "segmentation": [corners], "area": 48}
            box = {"bbox": [3, 4, 8, 6], **common}
            kept["annotations"] += [
                {"id": 2 * number + 1, "category_id": 7, "iscrowd": 0, **box},
                {"id": 2 * number + 2, "category_id": 90, "iscrowd": 1, **box},
            ]
        kept["categories"] = [{"id": 90, "name": "b"}, {"id": 7, "name": "a"}]
        (place / "annotations").mkdir(exist_ok=True)
        (place / "annotations" / f"instances_{name}.json").write_text(json.dumps(kept))
    return json.loads((place / "annotations" / "instances_train2017.json").read_text())


def coco(tmp_path: Path, *overrides: str) -> Detection:
    words = (f"dataset.path={tmp_path / 'coco'}", "dataset.workers=0", "dataset.held_out=0.25")
    return task(tmp_path, "dataset=coco", *words, *overrides, *SMALL, "trainer.batch_size=3")


class Told(nn.Module):
    """Remembers what it is told, and answers as a detector does."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        self.images, self.targets = images, targets
        return {"a": torch.tensor(1.5), "b": torch.tensor(2.0)}


# --- what a network is told -----------------------------------------------------------------------


def test_a_network_is_told_each_image_in_its_size_with_what_is_learned(tmp_path: Path) -> None:
    write(tmp_path / "coco")
    built, told = coco(tmp_path, "dataset.flip=false"), Told()
    assert {name: len(split.rows) for name, split in built.splits.items()} == {
        "train": 3,
        "val": 1,
        "test": 4,
    }
    assert built.inputs == {"categories": 2}
    (batch,) = built.micro_batches(0, 0, 1)
    assert float(built.loss(told, batch)) == 3.5
    expected = torch.zeros(24, 41, dtype=torch.uint8)
    expected[4:10, 3:11] = 1
    seen = set()
    for image, target in zip(told.images, told.targets or [], strict=True):
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


def test_generated_boxes_and_masks_are_those_of_the_shapes(tmp_path: Path) -> None:
    """Shapes are brighter than the noise behind them, and boxes end where masks end."""
    built, told = task(tmp_path, *SHAPES), Told()
    for epoch in range(3):  # mirrored and not
        for batch in built.micro_batches(epoch, 0, 2):
            built.loss(told, batch)
            for image, target in zip(told.images, told.targets or [], strict=True):
                bright = (255 * image).round().amin(0) >= 110
                assert torch.equal(target["masks"].sum(0).bool(), bright)
                for box, mask in zip(target["boxes"], target["masks"], strict=True):
                    y, x = mask.nonzero().unbind(1)
                    ends = [x.min(), y.min(), x.max() + 1, y.max() + 1]
                    assert box.tolist() == [float(end) for end in ends]


def test_half_of_the_training_images_are_mirrored_and_no_others(tmp_path: Path) -> None:
    built = task(tmp_path, *SHAPES, "dataset.size=32")
    files, numbers = built.ahead.files, built.numbers["train"]
    mirrored = 0
    for number in numbers:
        plain, boxes, _, masks, _ = files[-1, number]
        for epoch in range(4):
            image, corners, _, shapes, _ = files[epoch, number]
            turned = not np.array_equal(image, plain)
            mirrored += turned
            assert np.array_equal(image[:, ::-1] if turned else image, plain)
            assert all(
                np.array_equal(a[:, ::-1] if turned else a, b)
                for a, b in zip(shapes, masks, strict=True)
            )
            widths = corners[:, 2] - corners[:, 0]
            assert np.array_equal(widths, boxes[:, 2] - boxes[:, 0])
    assert 44 <= mirrored <= 84  # of 128: 3.5 standard deviations


def test_a_rank_reads_its_micro_batches_alone_and_they_are_those_of_the_whole(
    tmp_path: Path,
) -> None:
    one, two = task(tmp_path, *SHAPES), task(tmp_path, *SHAPES)
    whole = one.micro_batches(1, 1, 2)
    (part,) = two.micro_batches(1, 1, 2, range(1, 2))
    assert [len(images) for images, *_ in whole] == [2, 2]
    assert all(map(torch.equal, part[:2], whole[1][:2]))
    tolds = Told(), Told()
    for told, batch in zip(tolds, (part, whole[1]), strict=True):
        one.loss(told, batch)
    for mine, theirs_ in zip(*(told.targets or [] for told in tolds), strict=True):
        assert all(torch.equal(mine[key], theirs_[key]) for key in theirs_)


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
    return Split(generated_shapes.Shapes(np.zeros((2, 100, 100, 3), np.uint8), dataset), [0, 1])


def square(image: int, left: int, score: float) -> dict[str, Any]:
    """A detection of 40 x 40 pixels at (left, 20)."""
    mask = torch.zeros(1, 1, 100, 100)
    mask[..., 20:60, left : left + 40] = 0.9
    said = {
        "boxes": torch.tensor([[left, 20.0, left + 40, 60]]),
        "labels": torch.tensor([1]),
        "scores": torch.tensor([score]),
        "masks": mask,
    }
    (one,) = found(image, said, [7])
    return one


def test_average_precision_by_hand() -> None:
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


class Knows(nn.Module):
    """Finds in every image a box that its pixels decide."""

    def forward(self, images: list[Tensor], targets: Any = None) -> list[dict[str, Tensor]]:
        made = []
        for image in images:
            bright = (image.amin(0) >= 110 / 255).float()
            y, x = bright.nonzero().unbind(1)
            box = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
            label = 1 + int(image.sum()) % 3
            score = image.mean().reshape(1)
            one = {"boxes": box[None].float(), "labels": torch.tensor([label]), "scores": score}
            made.append({**one, "masks": bright[None, None]})
        return made


def test_shares_of_an_evaluation_make_the_whole(tmp_path: Path) -> None:
    built, model = task(tmp_path, *SHAPES), Knows()
    whole = built.evaluate(model, "test")
    assert 0 < whole["box_ap"] < 1
    assert 0 < whole["mask_ap50"] < 1
    shares = [built.tally(model, "test", rank, 4) for rank in range(4)]
    assert built.metrics_of("test", shares) == whole
    assert built.metrics_of("test", [shares[2], shares[0], shares[3], shares[1]]) == whole
    few = task(tmp_path, *SHAPES, "trainer.limit_evaluation=5")
    assert len(few.splits["test"].rows) == 5
    assert few.evaluate(model, "test") != whole


# --- the network ----------------------------------------------------------------------------------


def network(categories: int = 3, **changed: Any) -> nn.Module:
    plain = {**config("x", *SHAPES).plain["model"], **changed}
    return models.build(plain, {"categories": categories})


def test_in_its_sizes_it_is_torchvisions() -> None:
    wide = {"min_size": 800, "max_size": 1333, "regions": 512, "anchors": [32, 64, 128, 256, 512]}
    with torch.device("meta"):
        ours = network(90, backbone="resnet50", width=256, **wide)
        other = theirs.detection.maskrcnn_resnet50_fpn(weights_backbone=None)
    shapes = [{name: t.shape for name, t in m.state_dict().items()} for m in (ours, other)]
    assert shapes[0] == shapes[1]
    chosen, left = config("x", "dataset=coco", "model=mask_rcnn").model, []
    for layer in candidates(ours):
        if any(re.fullmatch(expression, layer.module_name) for expression in chosen.exclude or []):
            left.append(layer.module_name)
    assert left[0] == "backbone.body.conv1"
    assert {name.partition(".")[0] for name in left[1:]} == {"rpn", "roi_heads"}


def test_losses_and_detections_in_both_modes(tmp_path: Path) -> None:
    """With torchvision's own answers in training mode; the statistics are those of the mode."""
    built, model = task(tmp_path, *SHAPES), network()
    (batch,) = built.micro_batches(0, 0, 1)
    told = Told()
    built.loss(told, batch)
    statistics = model.backbone.body.bn1.running_mean.clone()
    model.eval()
    torch.manual_seed(0)
    loss = built.loss(model, batch)
    assert not any(module.training for module in model.modules())
    assert torch.equal(model.backbone.body.bn1.running_mean, statistics)
    for module in (model, model.rpn, model.roi_heads):
        module.training = True
    torch.manual_seed(0)
    plain = theirs.detection.MaskRCNN.forward(model, told.images, told.targets)
    assert len(plain) == 5
    torch.testing.assert_close(loss, sum(plain.values()))
    assert set(model(told.images)[0]) == {"boxes", "labels", "scores", "masks"}
    assert network(frozen_norms=True).train().backbone.body.bn1.training is False
    assert network(frozen_norms=False).train().backbone.body.bn1.training is True


def test_it_begins_with_a_classifiers_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "without_weights", lambda place: "")
    torch.manual_seed(3)
    classifier, model = theirs.resnet18(num_classes=5), network()
    save_file(classifier.state_dict(), tmp_path / "model.safetensors")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    asked = (str(tmp_path), "init=x", model.heads_of_tasks, model.part_of_tasks)
    start.load(model, *asked)
    for name, tensor in model.state_dict().items():
        inside = name.removeprefix("backbone.body.")
        expected = classifier.state_dict()[inside] if inside != name else before[name]
        assert torch.equal(tensor, expected)
    other = network()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    start.load(other, *asked)
    assert all(torch.equal(t, other.state_dict()[n]) for n, t in model.state_dict().items())
    save_file(theirs.resnet34(num_classes=5).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"another network than this run's: layer1\.2"):
        start.load(network(), *asked)


@pytest.mark.slow
def test_a_run_and_one_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SHAPES, "trainer.batch_size=4", "trainer.epochs=2", "trainer.accumulate=2")
    words = (*words, "recipe=sr_ste", "optimizer=sgd", "trainer.limit_evaluation=4")
    made = config(tmp_path / "whole", *words)
    result = runner.run(made, run_folder(made))
    names = {f"{kind}_ap{at}" for kind in ("box", "mask") for at in ("", "50", "75")}
    assert {f"test/{name}" for name in names} <= set(result["metrics"]["final"])
    assert result["metric"] == "box_ap"
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    assert result["flops"]["training_arithmetic"] < result["flops"]["training_dense"]
    again, name = config(tmp_path / "cut", *words), "model.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train", stopping(Loop.train, 3))
        assert runner.run(again, run_folder(again))["status"] == "interrupted"
    assert runner.run(again, run_folder(again))["status"] == "finished"
    folders = [run_folder(one) for one in (made, again)]
    assert rows(folders[0]) == rows(folders[1])
    assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


# --- mistakes -------------------------------------------------------------------------------------


def broken(place: Path, **changed: Any) -> None:
    kept = write(place)
    file = place / "annotations" / "instances_train2017.json"
    file.write_text(json.dumps({**kept, **changed}))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"categories": []}, "instances_train2017.json: it has no categories"),
        ({"images": []}, "it has no images"),
        ({"annotations": []}, "it has no annotations"),
        ({"annotations": [{"id": 1}]}, "no annotations of COCO: KeyError"),
        ({"annotations": 3}, "no annotations of COCO: TypeError"),
        ({"categories": [{"id": 7, "name": "a"}]}, "annotation 2: there is no category 90"),
    ],
)
def test_broken_annotations_cost_one_line(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    broken(tmp_path / "coco", **changed)
    with pytest.raises(ConfigError) as caught:
        coco(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_masks_no_images_no_files(tmp_path: Path) -> None:
    place = tmp_path / "coco"
    with pytest.raises(ConfigError, match=r"dataset=coco: there is no .*annotations/instances_"):
        coco(tmp_path)
    kept = write(place)
    boxes = [{**a, "segmentation": []} for a in kept["annotations"]]
    file = place / "annotations" / "instances_train2017.json"
    file.write_text(json.dumps({**kept, "annotations": boxes}))
    with pytest.raises(ConfigError, match="annotation 1 has no segmentation, from which masks"):
        coco(tmp_path)
    areas = [{k: v for k, v in a.items() if k != "area"} for a in kept["annotations"]]
    file.write_text(json.dumps({**kept, "annotations": areas}))
    with pytest.raises(ConfigError, match="annotation 1 has no area"):
        coco(tmp_path)
    file.write_text("{")
    with pytest.raises(ConfigError, match="no annotations of COCO: JSONDecodeError"):
        coco(tmp_path)
    crowds = [{**a, "iscrowd": 1} for a in kept["annotations"]]
    file.write_text(json.dumps({**kept, "annotations": crowds}))
    with pytest.raises(ConfigError, match="leaves 0 with an instance for training and 1 for val"):
        coco(tmp_path)
    file.write_text(json.dumps(kept))
    (place / "train2017" / "2.png").unlink()
    with pytest.raises(ConfigError, match=r"1 of 4 images are not in .*, for instance 2\.png"):
        coco(tmp_path)
    (place / "val2017" / "2.png").rename(place / "train2017" / "2.png")
    with pytest.raises(ConfigError, match=r"instances_val2017.json: 1 of 4 images"):
        coco(tmp_path)
    (place / "annotations" / "instances_val2017.json").unlink()
    with pytest.raises(
        ConfigError, match=r"there is no .*instances_val2017\.json: dataset.path is"
    ):
        coco(tmp_path)


def test_an_image_that_is_none_and_one_of_another_size(tmp_path: Path) -> None:
    write(tmp_path / "coco")
    for path in (tmp_path / "coco" / "train2017").iterdir():
        path.write_text("no image")
    with pytest.raises(ConfigError, match=r"\d\.png is damaged, or not an image"):
        coco(tmp_path).example()
    with pytest.raises(RunError, match=r"\d\.png is damaged, or not an image"):
        coco(tmp_path).micro_batches(0, 0, 1)
    for path in (tmp_path / "coco" / "train2017").iterdir():
        Image.new("RGB", (9, 8)).save(path)
    with pytest.raises(RunError, match=r"\d\.png is 9x8, and \d\dx24 by its annotations"):
        coco(tmp_path).micro_batches(0, 0, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("trainer.label_smoothing=0.1",), "is for classes"),
        (("trainer.compile=true",), "the shapes in a detector depend on what it finds"),
        (("trainer.batch_size=100",), "there are only 8 images for training"),
    ],
)
def test_options_that_are_not_for_detectors(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tasks.build(config(tmp_path, *SHAPES, *words), CPU)
