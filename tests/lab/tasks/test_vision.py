"""Images from the disk: what is read, how it is split, cached, streamed and resumed, and what is
said of data that are not right.
"""

from __future__ import annotations

import gc
import gzip
import io
import itertools
import json
import lzma
import multiprocessing
import multiprocessing.process
import os
import pickle
import shutil
import signal
import subprocess
import tarfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import one_line
from pictures import COUNTS, make_folder, picture
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from runs import config, cut_off, outcome, resumed
from torch import Tensor, nn
from torchvision.transforms import RandomResizedCrop

from nmrun.errors import ConfigError, RunError
from nmrun.lab import tasks
from nmrun.lab.config.identity import identity, run_folder
from nmrun.lab.export.cli import image_input
from nmrun.lab.keys.datasets import Subset
from nmrun.lab.tasks.base import generator
from nmrun.lab.tasks.vision import images
from nmrun.lab.tasks.vision.stream import ImageFiles, ImageStream
from nmrun.lab.train import build, checkpoint, console, runner
from nmrun.lab.train.steps import TrainingSteps

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))


# --- image folders --------------------------------------------------------------------------------


def test_a_folder_is_read_pixel_by_pixel(tmp_path):
    splits, classes = images.load_folder(make_folder(tmp_path / "some"), size=8)
    assert classes == ["ant", "bee", "cat"]
    assert set(splits) == {"train", "val"}
    for split, count in COUNTS.items():
        pixels, labels = splits[split]
        assert labels.tolist() == [0] * count + [1] * count + [2] * count
        for row, image in enumerate(pixels):
            assert np.array_equal(
                image.permute(1, 2, 0).numpy(), picture(split, row // count, row % count)
            )


def test_images_are_decoded_once_unless_they_change(tmp_path, monkeypatch):
    place, decoded, original = make_folder(tmp_path / "some"), [], images.decode
    monkeypatch.setattr(
        images, "decode", lambda path, size: decoded.append(path) or original(path, size)
    )
    first, _ = images.load_folder(place, size=8)
    assert len(decoded) == 48
    again, _ = images.load_folder(place, size=8)
    assert len(decoded) == 48
    assert torch.equal(first["train"][0], again["train"][0])
    Image.fromarray(255 - picture("train", 0, 0)).save(place / "train" / "ant" / "00.png")
    changed, _ = images.load_folder(place, size=8)
    assert len(decoded) == 96
    assert torch.equal(changed["train"][0][0], 255 - first["train"][0][0])
    assert images.load_folder(place, size=4)[0]["val"][0].shape == (12, 3, 4, 4)


@pytest.mark.parametrize("ending", ["tar", "tar.gz", "tar.xz"])
def test_a_damaged_archive_is_refused_and_not_read_in_part(ending, tmp_path):
    place, archive = make_folder(tmp_path / "some"), tmp_path / f"some.{ending}"
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        tar.add(place, "some")
    content, pack = bytearray(plain.getvalue()), PACK[ending]
    archive.write_bytes(pack(bytes(content)))
    whole, _ = images.load_folder(archive, size=8)
    assert {split: len(labels) for split, (_, labels) in whole.items()} == {"train": 36, "val": 12}
    content[content.index(b"some/train/cat/05.png")] ^= 1  # in a header, whose sum is then wrong
    archive.write_bytes(pack(bytes(content)))
    with one_line(ConfigError, rf"some.{ending} cannot be unpacked: "):
        images.load_folder(archive, size=8)
    if ending != "tar":
        packed = bytearray(pack(plain.getvalue()))
        packed[len(packed) // 2] ^= 1
        archive.write_bytes(packed)
        with one_line(ConfigError, rf"some.{ending} cannot be unpacked"):
            images.load_folder(archive, size=8)


PACK = {"tar": bytes, "tar.gz": gzip.compress, "tar.xz": lzma.compress}


def test_links_to_the_same_files_under_other_classes_are_other_labels(tmp_path):
    files = sorted((make_folder(tmp_path / "pool") / "train").rglob("*.png"))
    for view, first in (("one", 12), ("two", 20)):
        for number, file in enumerate(files):
            folder = tmp_path / view / ("few" if number < first else "rest")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:02}.png").symlink_to(file)
        labels = images.load_folder(tmp_path / view, size=8)[0]["train"][1]
        assert labels.tolist() == [0] * first + [1] * (36 - first)


def test_grey_images_are_read_as_coloured_ones(tmp_path):
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(tmp_path / "grey.png")
    assert np.array_equal(images.decode(str(tmp_path / "grey.png"), 4), np.full((4, 4, 3), 9))


FINE = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040  # over all 16 bits


def read_by(reader: str, path: Path) -> np.ndarray:
    """A square image of 8 pixels a side as a network gets it, before it is normalised."""
    if reader == "folder":
        return images.decode(str(path), 8)
    if reader == "predict":
        means = {"mean": [0.0] * 3, "std": [1.0] * 3}
        signature = {"shape": [3, 8, 8], "range": [0, 255], **means}
        return image_input(path, signature).permute(1, 2, 0).numpy()
    files = ImageFiles(np.array([bytes(path)]), 8, 1.0, False, 0)
    part, _, problem = files[0 if reader == "part" else -1, 0]
    if problem:
        raise ConfigError(problem)
    return part.numpy()


@pytest.mark.parametrize("reader", ["folder", "predict", "part", "middle"])
@pytest.mark.parametrize(("suffix", "kind"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2")])
def test_of_16_bits_the_upper_8_are_read(reader, suffix, kind, tmp_path):
    """As if the file had these alone."""
    Image.fromarray(FINE.astype(kind)).save(fine := tmp_path / f"fine.{suffix}")
    Image.fromarray((FINE // 256).astype(np.uint8)).save(plain := tmp_path / "plain.png")
    found = read_by(reader, fine)
    assert np.array_equal(found, read_by(reader, plain))
    assert len(np.unique(found)) > 20


@pytest.mark.parametrize("reader", ["folder", "predict", "part", "middle"])
@pytest.mark.parametrize(("kind", "mode"), [(np.float32, "F"), (np.int32, "I")])
def test_pixels_without_a_range_are_refused(reader, kind, mode, tmp_path):
    Image.fromarray(FINE.astype(kind)).save(file := tmp_path / "odd.tif")
    line = f"^{file} has pixels of mode {mode}; images have 8 or 16 bits$"
    with one_line(ConfigError, line):
        read_by(reader, file)


def dataset_config(tmp_path: Path, name: str, *overrides: str) -> Any:
    return config(tmp_path / "out", f"dataset={name}", *overrides)


def folder_config(tmp_path: Path, *overrides: str) -> Any:
    return dataset_config(
        tmp_path,
        "image_folder",
        "dataset.path=some",
        "dataset.resolution=8",
        "trainer.batch_size=8",
        *overrides,
    )


def test_a_folder_without_splits_is_split_evenly(tmp_path):
    make_folder(tmp_path / "data", splits={"some": 20})
    task = tasks.build(folder_config(tmp_path), CPU)
    sizes = {name: torch.bincount(labels).tolist() for name, (_, labels) in task.splits.items()}
    assert sizes == {"test": [2] * 3, "val": [2] * 3, "train": [16] * 3}


@pytest.mark.parametrize(
    ("shapes", "side"),
    [
        ([(40, 36)] * 20, 36),
        ([(64, 64)] * 20, 64),
        ([(65, 300)] * 20, 224),
        ([(20, 24)] * 12 + [(300, 400)] * 8, 20),
    ],
)
def test_without_a_resolution_photos_are_224_pixels_and_small_images_stay(shapes, side, tmp_path):
    for name in ("ant", "bee"):
        folder = tmp_path / "data" / "some" / name
        folder.mkdir(parents=True)
        for number, shape in enumerate(shapes):
            pixels = np.full((*shape, 3), number, np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:02}.png")
    words = "dataset.path=some", "trainer.batch_size=8"
    task = tasks.build(dataset_config(tmp_path, "image_folder", *words), CPU)
    assert task.inputs["shape"] == (3, side, side)
    assert task.signature["input"]["resize"] == {"shorter_side": side, "crop": side}


@pytest.mark.parametrize(
    ("size", "limit", "told"), [(10, "null", "8 of 48"), (10, 2, ""), (8, "null", "")]
)
def test_what_an_epoch_leaves_out_is_told(size, limit, told, tmp_path):
    make_folder(tmp_path / "data", splits={"some": 20})
    words = f"trainer.batch_size={size}", f"trainer.limit_batches={limit}"
    task = tasks.build(folder_config(tmp_path, *words), CPU)
    assert (task.left_out != "") == (told != "")
    assert told in task.left_out


@pytest.mark.parametrize(
    ("tested", "counts"), [(0, "54 train, 6 val, 12 test"), (5, "60 train, 12 val, 15 test")]
)
def test_val_is_for_testing_unless_there_is_a_test_folder(tested, counts, tmp_path):
    make_folder(tmp_path / "data" / "some", splits={"train": 20, "val": 4})
    if tested:
        make_folder(tmp_path / "data" / "some", splits={"test": tested})
    cfg = folder_config(tmp_path)
    line = f"  images of 3x8x8 in 3 classes ({counts}) from {tmp_path}/data/some"
    assert line in console.plan_lines(cfg, build.build(cfg))


def test_what_is_wrong_with_a_folder(tmp_path, monkeypatch):
    def complaint(**options):
        with pytest.raises(ConfigError) as caught:
            tasks.build(folder_config(tmp_path), CPU)
        (problem,) = caught.value.problems
        assert "\n" not in problem
        assert not list((tmp_path / "cache").glob("*")), "something half-done is left"
        return problem

    place = make_folder(tmp_path / "data" / "some")
    (place / "train" / "empty").mkdir()
    assert "train: Found no valid file for the classes empty" in complaint()
    (place / "train" / "empty").rmdir()
    shutil.move(place / "val" / "bee", tmp_path / "bee")
    assert "train and val have not the same classes, for instance bee" in complaint()
    shutil.move(tmp_path / "bee", place / "val" / "bee")
    (place / "train").rename(place / "training")
    assert "some: there is val and no train: name the folder" in complaint()
    (place / "training").rename(place / "train")
    damaged = place / "val" / "cat" / "01.png"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    assert f"{damaged} is damaged, or not an image" in complaint()
    damaged.write_bytes(whole)
    monkeypatch.setattr(os, "sysconf", lambda name: 32)
    assert (
        "dataset.resolution=8 do not fit into memory; dataset=imagenet reads as it trains"
        in complaint()
    )
    shutil.rmtree(place)
    place.write_bytes(b"not an archive")
    assert "some cannot be unpacked" in complaint()
    with tarfile.open(place, "w") as tar:
        tar.add(make_folder(tmp_path / "whole"), "some")
        link = tarfile.TarInfo("some/train/dog")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    assert "some cannot be unpacked" in complaint()


# --- splits ---------------------------------------------------------------------------------------


def numbered(count: int, classes: int, first: int = 0) -> tuple[Tensor, Tensor]:
    return torch.arange(first, first + count), torch.arange(count) % classes


def test_splits_are_balanced_disjoint_and_nested():
    pool, test = numbered(500, 5), numbered(100, 5, first=1000)
    whole = images.split(pool, test, 5, Subset())
    assert {name: torch.bincount(labels).tolist() for name, (_, labels) in whole.items()} == {
        "train": [90] * 5, "val": [10] * 5, "test": [20] * 5,
    }  # fmt: skip
    assert sorted(torch.cat([whole["train"][0], whole["val"][0]]).tolist()) == list(range(500))
    assert sorted(whole["test"][0].tolist()) == list(range(1000, 1100))
    smaller = images.split(pool, test, 5, Subset(train_size=52, test_size=7))
    assert torch.bincount(smaller["train"][1]).tolist() == [11, 11, 10, 10, 10]
    assert torch.bincount(smaller["test"][1]).tolist() == [2, 2, 1, 1, 1]
    assert torch.equal(smaller["val"][0], whole["val"][0])
    larger = images.split(pool, test, 5, Subset(train_size=100))
    assert (
        {*smaller["train"][0].tolist()}
        < {*larger["train"][0].tolist()}
        < {*whole["train"][0].tolist()}
    )
    for name, (numbers, labels) in larger.items():
        assert torch.equal(labels, (numbers - (1000 if name == "test" else 0)) % 5)
    other = images.split(pool, test, 5, Subset(split_seed=1))
    assert {*other["val"][0].tolist()} != {*whole["val"][0].tolist()}


def test_sizes_that_the_data_do_not_have():
    labels = torch.tensor([0] * 30 + [1] * 4)
    pool = (torch.arange(34), labels)
    with pytest.raises(ConfigError, match=r"train_size=20: 10 images of class 1, .* there are 4"):
        images.split(pool, pool, 2, Subset(train_size=20))
    with pytest.raises(ConfigError, match=r"train_size: no image is left for it of the 8"):
        images.split(numbered(8, 2), pool, 2, Subset(val_size=8))


@pytest.mark.parametrize("dataset", ["image_folder", "imagenet"])
def test_what_the_signature_says_makes_the_networks_input(dataset, tmp_path):
    """With PIL and NumPy alone, as somebody does it who has no nmrun."""
    place = make_folder(tmp_path / "data" / "some", (32, 64))
    task: Any = (
        stream(tmp_path, "dataset.workers=0", "dataset.resolution=14")
        if dataset == "imagenet"
        else tasks.build(folder_config(tmp_path), CPU)
    )
    signature = json.loads(json.dumps(task.signature))
    assert signature["classes"] == ["ant", "bee", "cat"]
    image_input, size = signature["input"], signature["input"]["resize"]
    assert image_input["range"] == [0, 255]
    prepared = []
    files = sorted((place / "val").rglob("*.png"))
    for file in files:
        with Image.open(file) as opened:
            image = opened.convert(image_input["colours"])
        scale = size["shorter_side"] / min(image.size)
        sides = [round(scale * side) for side in image.size]
        image = image.resize(sides, Image.Resampling.BILINEAR)
        left, top = ((side - size["crop"]) // 2 for side in image.size)
        image = image.crop((left, top, left + size["crop"], top + size["crop"]))
        pixels = np.asarray(image, np.float32).transpose(2, 0, 1)
        mean, std = (np.float32(image_input[key])[:, None, None] for key in ("mean", "std"))
        prepared.append((pixels - mean) / std)
        assert list(prepared[-1].shape) == image_input["shape"]
    task.evaluate(network := Recorder(), "test")
    inputs = torch.cat(network.seen)
    assert len(inputs) == len(files)
    inside = np.s_[..., 1:-1, 1:-1]  # what lies beyond the cut is mixed into its border, or not
    near = [np.abs(np.stack(prepared) - image.numpy())[inside].max((1, 2, 3)) for image in inputs]
    assert sorted(int(gaps.argmin()) for gaps in near) == list(range(len(files)))
    assert max(gaps.min() for gaps in near) < 1e-5


class Recorder(nn.Module):
    """Keeps the images that it is given, and takes none for any of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        return torch.zeros(len(images), 3)


# --- torchvision's data sets ----------------------------------------------------------------------


def fake_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The files of CIFAR-10 with ten images each, whose checksums nobody looks at."""
    from torchvision import datasets

    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 3072), np.uint8)
    for number, (name, _) in enumerate([*datasets.CIFAR10.train_list, *datasets.CIFAR10.test_list]):
        content = {"data": pixels[10 * number : 10 * number + 10], "labels": list(range(10))}
        (folder / name).write_bytes(pickle.dumps(content))
    names = {"label_names": [f"class {number}" for number in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names))
    for part in ("train_list", "test_list"):
        unchecked = [[name, None] for name, _ in getattr(datasets.CIFAR10, part)]
        monkeypatch.setattr(datasets.CIFAR10, part, unchecked)
    monkeypatch.setitem(datasets.CIFAR10.meta, "md5", None)
    return pixels.reshape(60, 3, 32, 32)


@pytest.mark.parametrize("folder", ["", "cifar10"])
def test_cifar_as_torchvision_stores_it(folder, tmp_path, monkeypatch):
    pixels = fake_cifar(tmp_path / "data" / folder, monkeypatch)
    cfg = dataset_config(tmp_path, "cifar10", "dataset.val_size=10", "trainer.batch_size=8")
    task = tasks.build(cfg, CPU)
    assert task.inputs == {"shape": (3, 32, 32), "classes": 10}
    every = torch.cat([task.splits[split][0] for split in ("train", "val")])
    assert {image.numpy().tobytes() for image in every} == {
        image.tobytes() for image in pixels[:50]
    }
    stored, labels = task.splits["test"]
    for image, label in zip(stored, labels, strict=True):
        assert np.array_equal(image.numpy(), pixels[50 + int(label)])
    assert task.signature["classes"] == [f"class {number}" for number in range(10)]


def test_fashion_mnist_as_torchvision_stores_it(tmp_path):
    raw = tmp_path / "data" / "fashion_mnist" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28), np.uint8)
    for name, part in (("train", pixels[:30]), ("t10k", pixels[30:])):
        labels = (np.arange(len(part)) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", part), ("labels-idx1", labels)):
            sizes = np.array(array.shape, ">i4").tobytes()
            content = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(content)
    (train, labels), (test, _), names, _ = images.read_torchvision("fashion_mnist")
    assert train.shape == (30, 1, 28, 28)
    assert np.array_equal(train[:, 0].numpy(), pixels[:30])
    assert np.array_equal(test[:, 0].numpy(), pixels[30:])
    assert labels.tolist() == [number % 10 for number in range(30)]
    assert names[0] == "T-shirt/top"


@pytest.mark.parametrize("side", [48, 16])
def test_cifar_at_another_resolution_is_as_pillow_scales_it(side, tmp_path, monkeypatch):
    fake_cifar(tmp_path / "data", monkeypatch)
    words = ("cifar10", "dataset.val_size=10", "trainer.batch_size=8")
    plain = tasks.build(dataset_config(tmp_path, *words), CPU)
    task = tasks.build(dataset_config(tmp_path, *words, f"dataset.resolution={side}"), CPU)
    for name, (pixels, labels) in task.splits.items():
        original, same = plain.splits[name]
        assert torch.equal(labels, same)
        for scaled, image in zip(pixels, original, strict=True):
            drawn = Image.fromarray(image.permute(1, 2, 0).numpy())
            drawn = drawn.resize((side, side), Image.Resampling.BILINEAR)
            assert np.array_equal(scaled.permute(1, 2, 0), np.asarray(drawn))
    assert task.signature["input"]["shape"] == [3, side, side]
    assert task.signature["input"]["resize"] == {"shorter_side": side, "crop": side}
    monkeypatch.setattr(os, "sysconf", lambda name: 32)
    with pytest.raises(ConfigError, match="do not fit into memory"):
        tasks.build(dataset_config(tmp_path, *words, f"dataset.resolution={side}"), CPU)


def test_cifar_from_its_archive_of_images(tmp_path):
    place = make_folder(tmp_path / "cifar10-jpeg", (32, 32), {"train": 12, "test": 4})
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    with tarfile.open(tmp_path / "data" / "cifar10" / "cifar10-jpeg.tar.xz", "w:xz") as tar:
        tar.add(place, "cifar10-jpeg")
    (train, labels), (test, _), names, file = images.read_torchvision("cifar10")
    assert file.name == "cifar10-jpeg.tar.xz"
    assert train.shape == (36, 3, 32, 32)
    for row, image in enumerate(test.permute(0, 2, 3, 1)):
        assert np.array_equal(image, picture("test", row // 4, row % 4, (32, 32)))
    assert labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert names == ["ant", "bee", "cat"]


def test_without_data_and_network_it_is_said_in_a_line(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    with one_line(ConfigError, rf"it is not in {tmp_path}/data .* download failed: .*no network"):
        tasks.build(dataset_config(tmp_path, "cifar100"), CPU)
    assert not any(path.is_file() for path in (tmp_path / "data").rglob("*"))


def test_damaged_files_of_torchvision(tmp_path, monkeypatch):
    fake_cifar(tmp_path / "data", monkeypatch)
    (tmp_path / "data" / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(ConfigError, match=r"cifar-10-batches-py: .* corrupted; remove it, and it"):
        tasks.build(dataset_config(tmp_path, "cifar10"), CPU)


def test_a_download_arrives_whole(tmp_path, monkeypatch):
    places = []

    class CIFAR100:
        data, targets = np.zeros((4, 32, 32, 3), np.uint8), [0, 1, 0, 1]
        classes = ("a", "b")

        def __init__(self, root, train, download):
            if download:
                (root / "cifar-100-python").mkdir()
                (root / "cifar-100-python" / "train").write_text("all of it")
                (root / "cifar-100-python.tar.gz").write_text("all of it, compressed")
            assert (root / "cifar-100-python" / "train").read_text() == "all of it"
            places.append(root)

    monkeypatch.setattr("torchvision.datasets.CIFAR100", CIFAR100)
    _, _, _, place = images.read_torchvision("cifar100")
    assert place == tmp_path / "data" / "cifar100" / "cifar-100-python"
    assert places[1:] == [place.parent] * 2
    assert [path.relative_to(tmp_path / "data") for path in sorted((tmp_path / "data").rglob("*"))] == [
        Path("cifar100"), Path("cifar100/cifar-100-python"), Path("cifar100/cifar-100-python/train"),
    ]  # fmt: skip


REAL = Path(os.environ.get("NMRUN_DATA", "~/.cache/nmrun")).expanduser()


@pytest.mark.minutes
@pytest.mark.skipif(not (REAL / "cifar10").is_dir(), reason="CIFAR-10 is not in NMRUN_DATA")
def test_the_real_cifar10(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_DATA", str(REAL))
    task = tasks.build(dataset_config(tmp_path, "cifar10"), CPU)
    counts = {name: torch.bincount(labels).tolist() for name, (_, labels) in task.splits.items()}
    assert counts == {"train": [4500] * 10, "val": [500] * 10, "test": [1000] * 10}
    known = {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2470, 0.2435, 0.2616]}
    for name, published in known.items():
        value = getattr(task.normalise, name).flatten() / 255
        assert torch.allclose(value, torch.tensor(published), atol=0.002)


# --- training -------------------------------------------------------------------------------------

ALL = (
    "dataset.crop_padding=1", "dataset.flip=true", "dataset.randaugment=1", "dataset.erasing=0.3", "dataset.mixup=0.2",
    "dataset.cutmix=1.0", "trainer.accumulate=2", "trainer.label_smoothing=0.1", "recipe=step", "recipe.switch=0.5",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["image_folder", "imagenet"])
def test_a_run_cut_off_ends_with_the_same_bits(dataset, tmp_path):
    make_folder(tmp_path / "data" / "some", (10, 12))
    options = [
        *("dataset.path=some", "dataset.resolution=8", "dataset.val_size=6"),
        *("trainer.batch_size=10", "trainer.limit_batches=2"),
        *(option for option in ALL if dataset == "image_folder" or "crop_padding" not in option),
        *(["dataset.workers=0"] if dataset == "imagenet" else []),
    ]
    resumed(tmp_path, f"dataset={dataset}", *options, by=cut_off, steps=(3, 5))


class Brightness(nn.Module):
    """Tells the three classes of ``picture`` by their mean."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((1, 2, 3), keepdim=False)[:, None]
        return -(mean - torch.tensor([-1.0, 0.0, 1.0])).abs()


@pytest.mark.parametrize("dataset", ["image_folder", "imagenet"])
def test_evaluation_is_over_all_images_in_the_middle(dataset, tmp_path):
    make_folder(tmp_path / "data" / "some")
    words = ("dataset.path=some", "dataset.resolution=8", "dataset.val_size=9")
    cfg = dataset_config(tmp_path, dataset, *words, "trainer.batch_size=5")
    task = tasks.build(cfg, CPU)
    assert task.evaluate(Brightness().eval(), "test")["accuracy"] == 1.0
    wrong = task.evaluate(Recorder().eval(), "val")
    assert wrong == pytest.approx({"loss": np.log(3), "accuracy": 1 / 3})


# --- images that are read while training ----------------------------------------------------------


STREAM = (
    *("dataset.path=some", "dataset.resolution=8"),
    *("dataset.val_size=6", "trainer.batch_size=5"),
)


def stream(tmp_path: Path, *overrides: str) -> ImageStream:
    task = tasks.build(dataset_config(tmp_path, "imagenet", *STREAM, *overrides), CPU)
    assert isinstance(task, ImageStream)
    return task


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_anywhere(workers, tmp_path):
    make_folder(tmp_path / "data" / "some", (10, 12))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    task = stream(tmp_path, f"dataset.workers={workers}", "trainer.limit_batches=3")
    places = itertools.product(range(3), range(3))
    in_order = {place: task.micro_batches(*place, 1)[0] for place in places}
    assert torch.equal(state, torch.get_rng_state())
    fresh = stream(tmp_path, "dataset.workers=0", "trainer.limit_batches=3")
    for place in ((1, 2), (2, 0), (0, 1)):
        torch.manual_seed(5)
        again = [torch.cat(parts) for parts in zip(*fresh.micro_batches(*place, 2), strict=True)]
        assert all(map(torch.equal, in_order[place], again))
    assert not torch.equal(in_order[0, 0][0], in_order[1, 0][0])
    other = stream(tmp_path, "seed=1", "dataset.workers=0")
    assert not torch.equal(other.micro_batches(0, 0, 1)[0][0], in_order[0, 0][0])


@pytest.mark.slow
def test_a_signal_to_all_processes_ends_a_run_in_order(tmp_path, monkeypatch):
    """As timeout(1), systemd and Slurm send it: to those that read images too."""
    make_folder(tmp_path / "data" / "some")
    options = ("recipe=step", "dataset=imagenet", *STREAM, "dataset.workers=2")
    cut, alone = (config(tmp_path / name, *options) for name in ("cut", "alone"))
    original, readers = TrainingSteps.train_step, list[Any]()
    before = multiprocessing.active_children()  # of other tests

    def signalled(loop, *args, **kwargs):
        if loop.step == 4:
            readers.extend(set(multiprocessing.active_children()) - set(before))
            everyone = [str(process.pid) for process in readers] + [str(os.getpid())]
            subprocess.run(["sh", "-c", f"kill -TERM {' '.join(everyone)}"], check=True)
        original(loop, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingSteps, "train_step", signalled)
        result = runner.run(cut, run_folder(cut))
    assert (result["status"], result.get("signal")) == ("interrupted", signal.SIGTERM)
    assert len(readers) == 2
    assert not any(process.is_alive() for process in readers)
    state = checkpoint.load(run_folder(cut) / "checkpoint.pt")
    assert state["loop"]["step"] == 5
    assert outcome(cut) == outcome(alone)


@pytest.mark.parametrize("with_a_thread", [False, True])
def test_a_reader_goes_when_the_training_tells_it(with_a_thread, tmp_path, monkeypatch):
    """Also one in which a library starts a thread, as OpenTelemetry does in each process."""
    base = multiprocessing.process.BaseProcess
    run = base.run

    def run_with_a_thread(process: Any) -> None:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        run(process)

    if with_a_thread:
        monkeypatch.setattr(base, "run", run_with_a_thread)
    make_folder(tmp_path / "data" / "some")
    task = stream(tmp_path, "dataset.workers=1")
    before = multiprocessing.active_children()  # of other tests
    task.micro_batches(0, 0, 1)
    (reader,) = set(multiprocessing.active_children()) - set(before)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        subprocess.run(["sh", "-c", f"kill -{int(number)} {reader.pid}"], check=True)
    reader.join(0.3)
    assert reader.is_alive()
    reader.terminate()
    reader.join(10)
    assert reader.exitcode == 0


def test_readers_go_with_the_task(tmp_path):
    """Without a collection of garbage, in which torch waits five seconds for each of them."""
    make_folder(tmp_path / "data" / "some")
    task = stream(tmp_path, "dataset.workers=2")
    before = multiprocessing.active_children()  # of other tests
    task.micro_batches(0, 0, 1)
    readers = set(multiprocessing.active_children()) - set(before)
    assert len(readers) == 2
    for index in range(1, task.batches_per_epoch):
        task.micro_batches(0, index, 1)
    task.micro_batches(1, 0, 1)  # an epoch later they are the same
    assert set(multiprocessing.active_children()) - set(before) == readers
    gc.disable()
    try:
        del task
        for reader in readers:
            reader.join(10)
        assert not any(reader.is_alive() for reader in readers)
    finally:
        gc.enable()


def test_each_epoch_of_a_stream_has_every_image_once(tmp_path):
    make_folder(tmp_path / "data" / "some")
    task = stream(tmp_path, "dataset.workers=0", "trainer.limit_batches=null")
    assert task.batches_per_epoch == 6
    keys = task.keys(0, 2, [*range(5)])
    read = [key for batch in itertools.islice(keys, 4 + 6) for key in batch]
    assert [epoch for epoch, _ in read] == [0] * 20 + [1] * 30
    assert sorted(row for _, row in read[20:]) == sorted(task.splits["train"][0].tolist())


def test_a_part_of_an_image_is_that_of_torchvision(tmp_path):
    make_folder(tmp_path / "data" / "some", (50, 40))
    files = stream(tmp_path, "dataset.resolution=16", "dataset.flip=false", "seed=3").files
    for epoch in range(30):
        image = Image.fromarray(picture("train", 0, 5, (50, 40)))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(generator(3, epoch, 5, 1).get_state())
            usual = RandomResizedCrop(16)(image)
        assert np.abs(files[epoch, 5][0].numpy().astype(int) - np.array(usual)).max() <= 1


def test_every_second_image_of_a_stream_is_mirrored(tmp_path):
    make_folder(tmp_path / "data" / "some", (20, 20))
    task, plain = (
        stream(tmp_path, "dataset.resolution=10", f"dataset.flip={flip}").files
        for flip in ("true", "false")
    )
    mirrored = 0
    for epoch in range(200):
        image, as_it_is = task[epoch, 2][0], plain[epoch, 2][0]
        turned = torch.equal(image, as_it_is.flip(1))
        assert turned or torch.equal(image, as_it_is)
        mirrored += turned
    assert 65 <= mirrored <= 135  # five standard deviations


def test_a_batch_of_a_stream_is_its_images_normalised(tmp_path):
    make_folder(tmp_path / "data" / "some", (20, 20))
    task = stream(tmp_path, "dataset.resolution=10", "dataset.workers=0")
    keys = next(task.keys(1, 2, [*range(5)]))
    inputs, labels = task.micro_batches(1, 2, 1)[0]
    images = torch.stack([task.files[key][0] for key in keys]).double() / 255
    expected = (images - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(inputs.double(), expected.permute(0, 3, 1, 2), atol=1e-5)
    names = [task.files.paths[row].decode().split("/")[-2] for _, row in keys]
    assert [["ant", "bee", "cat"][label] for label in labels.tolist()] == names


@pytest.mark.parametrize("shape", [(400, 330), (333, 1201)])
def test_parts_of_a_large_jpeg_are_where_they_should_be(shape, tmp_path, monkeypatch):
    make_folder(tmp_path / "data" / "some")
    # red says where a pixel is from, from top to bottom, green from left to right
    row, column = np.meshgrid(*(np.linspace(0, 255, side) for side in shape), indexing="ij")
    ramps = Image.fromarray(np.stack([row, column, row], 2).round().astype(np.uint8))
    ramps.save(path := tmp_path / "ramps.jpg", quality=100, subsampling=0)
    files = stream(tmp_path, "dataset.resolution=16", "dataset.flip=false").files
    files.paths = np.array([str(path).encode()])
    reduced, boxes, draft, parameters = [], [], JpegImageFile.draft, RandomResizedCrop.get_params

    def watched_draft(image, *asked):
        drafted = draft(image, *asked)
        reduced.append(image.size != shape[::-1])
        _, _, tall, wide = boxes[-1]
        assert (
            not reduced[-1]
            or min(tall * image.height / shape[0], wide * image.width / shape[1]) >= 2 * 16
        )
        return drafted

    def watched_parameters(*args):
        boxes.append(parameters(*args))
        return boxes[-1]

    monkeypatch.setattr(JpegImageFile, "draft", watched_draft)
    monkeypatch.setattr(RandomResizedCrop, "get_params", watched_parameters)
    for epoch in range(20):
        # at the borders the filter sees one side only
        part = files[epoch, 0][0].double()[1:-1, 1:-1]
        top, left, tall, wide = boxes[-1]
        centres = (torch.arange(1, 15) + 0.5) / 16
        cuts = (top, tall, shape[0]), (left, wide, shape[1])
        for channel, (begin, length, whole) in enumerate(cuts):
            expected = (begin + length * centres - 0.5) / (whole - 1) * 255
            # a quarter of a pixel, and JPEG's own errors
            near = 0.25 * length / 16 / (whole - 1) * 255 + 1.5
            assert ((part[..., channel].mean(1 - channel) - expected).abs() < near).all()
    assert any(reduced)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_ends_a_stream_with_its_name(workers, tmp_path):
    place = make_folder(tmp_path / "data" / "some")
    for damaged in (place / "train").rglob("*.png"):
        damaged.write_bytes(damaged.read_bytes()[:60])
    with one_line(RunError, r"train/.*\.png is damaged, or not an image"):
        stream(tmp_path, f"dataset.workers={workers}").micro_batches(0, 0, 1)


def test_a_stream_needs_train_and_val(tmp_path):
    make_folder(tmp_path / "data" / "some", splits={"train": 4})
    with pytest.raises(ConfigError, match=r"there is no .*train with a .*val beside it"):
        stream(tmp_path)


def test_a_stream_leaves_test_images_without_classes_alone(tmp_path):
    place = make_folder(tmp_path / "data" / "some")
    (place / "test").mkdir()
    (place / "train" / "ant" / "00.png").rename(place / "test" / "00.png")
    task = stream(tmp_path)
    assert [len(task.splits[split][1]) for split in ("train", "val", "test")] == [29, 6, 12]


def test_the_number_of_workers_makes_no_other_run(tmp_path):
    one, two, other = (dataset_config(tmp_path, "imagenet", option) for option in
                       ("dataset.workers=1", "dataset.workers=2", "dataset.resolution=64"))  # fmt: skip
    assert identity(one) == identity(two) != identity(other)


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipe_among_the_images_is_not_waited_for(stream, tmp_path):
    os.mkfifo(pipe := tmp_path / "a.png")
    if stream:
        _, _, problem = ImageFiles(np.array([bytes(pipe)]), 8, 0.5, False, 0)[0, 0]
    else:
        with pytest.raises(OSError, match="not a regular file") as raised:
            images.decode(str(pipe), 8)
        problem = str(raised.value)
    assert str(pipe) in problem
