"""Augmentation in batches: every image gets what the definition allows, as often as it should, and
the same again.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nmrun.lab.tasks.base import generator
from nmrun.lab.tasks.vision.augmentation import (
    Augment,
    Share,
    crop_and_flip,
    erase,
    mix,
    rand_augment,
)
from nmrun.lab.tasks.vision.classification import Classification, Normalise


def images(count: int, channels: int = 3, side: int = 8, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(
        1, 256, (count, channels, side, side + 2), dtype=torch.uint8, generator=random
    )


def test_crops_are_shifts_with_black_and_half_of_them_are_mirrored():
    whole = images(900, side=6)
    out = crop_and_flip(whole, 2, True, Share(generator(0), 900))
    seen: dict[tuple[int, int, bool], int] = {}
    for before, after in zip(whole, out, strict=True):
        canvas = torch.zeros(3, 10, 12, dtype=torch.uint8)
        canvas[:, 2:8, 2:10] = before
        for mirrored in (False, True):
            target = after.flip(-1) if mirrored else after
            for top in range(5):
                for left in range(5):
                    if torch.equal(canvas[:, top : top + 6, left : left + 8], target):
                        seen[top, left, mirrored] = seen.get((top, left, mirrored), 0) + 1
    assert sum(seen.values()) == 900
    assert len(seen) == 50  # every shift, mirrored or not
    mirrored = sum(count for (_, _, flip), count in seen.items() if flip)
    assert abs(mirrored - 450) < 4 * 15  # four standard deviations
    assert max(seen.values()) < 18 + 5 * math.sqrt(18)


@pytest.mark.parametrize("channels", [1, 3])
def test_randaugment_does_what_torchvision_does_to_single_images(channels):
    from torchvision.transforms import InterpolationMode, v2

    count, magnitude = 420, 19
    whole = images(count, channels, side=24)
    out = rand_augment(whole, magnitude, Share(generator(3), count))
    theirs = v2.RandAugment(1, magnitude)
    expected = {}
    for name, (magnitudes, signed) in theirs._AUGMENTATION_SPACE.items():
        scale = magnitudes(theirs.num_magnitude_bins, 24, 26)
        value = 0.0 if scale is None else float(scale[magnitude])
        how = {"interpolation": InterpolationMode.NEAREST, "fill": {torch.Tensor: None}}
        for number, factor in enumerate((1, -1) if signed else (1,)):
            apply = theirs._apply_image_or_video_transform
            made = [apply(image, name, factor * value, **how) for image in whole]
            expected[name, number] = torch.stack(made)
    counts: dict[str, int] = {}
    for row in range(count):  # a mean over a batch may be rounded to the other side of a half
        fits = [
            name
            for (name, _), results in expected.items()
            if (results[row].int() - out[row]).abs().max() <= 1
        ]
        assert fits, row
        for name in set(fits):
            counts[name] = counts.get(name, 0) + 1
    assert set(counts) == set(theirs._AUGMENTATION_SPACE)  # all fourteen
    # where all grey levels occur, they change nothing
    alike = {"Identity", "AutoContrast", *(["Color"] if channels == 1 else [])}
    assert all(counts[name] < 30 + 4 * math.sqrt(30) for name in {*counts} - alike)


def test_erased_boxes_have_the_sizes_and_the_frequency_of_the_definition():
    side, count = 40, 3000
    out = erase(torch.ones(count, 2, side, side), 0.3, Share(generator(5), count))
    erased = (out == 0).all(1)
    assert torch.equal(erased, (out == 0).any(1))  # all channels alike
    assert set(out.unique().tolist()) == {0.0, 1.0}
    hit = erased.flatten(1).any(1)
    assert abs(int(hit.sum()) - 900) < 4 * math.sqrt(count * 0.3 * 0.7)
    areas, ratios = [], []
    for box in erased[hit]:
        rows, columns = box.any(1).nonzero().flatten(), box.any(0).nonzero().flatten()
        tall, wide = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        assert int(box.sum()) == tall * wide  # a box, without holes
        areas.append(tall * wide / side**2)
        ratios.append(math.log(tall / wide))
    slack = 0.02  # half a pixel of each side
    assert 0.02 - slack < min(areas) < 0.05
    assert 0.30 < max(areas) < 0.33 + slack
    error = 0.31 / math.sqrt(12 * len(areas))
    assert sum(areas) / len(areas) == pytest.approx(0.175, abs=4 * error)
    assert sum(ratios) / len(ratios) == pytest.approx(0.0, abs=0.1)
    assert abs(max(ratios)) < math.log(3.3) + 0.25


def test_mixup_is_the_mean_that_its_labels_say():
    whole, labels = torch.randn(16, 3, 6, 6), torch.arange(16) % 5
    shares = []
    for index in range(200):
        mixed, soft = mix(whole, labels, 5, mixup=1.0, cutmix=0.0, random=generator(7, index))
        assert torch.allclose(soft.sum(1), torch.ones(16))
        partner = labels.roll(1)
        share = float(soft[1, labels[1]])  # the first two labels differ
        assert torch.allclose(mixed, share * whole + (1 - share) * whole.roll(1, 0), atol=1e-6)
        for row in range(16):
            expected = torch.zeros(5)
            expected[labels[row]] += share
            expected[partner[row]] += 1 - share
            assert torch.allclose(soft[row], expected, atol=1e-6)
        shares.append(share)
    # beta(1, 1) is uniform
    assert sum(shares) / 200 == pytest.approx(0.5, abs=4 / math.sqrt(12 * 200))
    assert min(shares) < 0.1
    assert max(shares) > 0.9


def test_cutmix_pastes_the_area_that_its_labels_say():
    whole, labels = torch.rand(8, 3, 16, 16), torch.arange(8)
    for index in range(50):
        mixed, soft = mix(whole, labels, 8, mixup=0.0, cutmix=1.0, random=generator(8, index))
        share = (mixed == whole).all(1).flatten(1).float().mean(1)
        other = (mixed == whole.roll(1, 0)).all(1).flatten(1).float().mean(1)
        assert torch.allclose(share + other, torch.ones(8))
        assert torch.allclose(soft.gather(1, labels[:, None]).squeeze(1), share, atol=1e-6)
        assert torch.allclose(soft.gather(1, labels.roll(1)[:, None]).squeeze(1), other, atol=1e-6)


def test_with_both_every_batch_has_one_of_them():
    whole, labels = torch.rand(4, 3, 8, 8), torch.arange(4)
    pasted = 0
    for index in range(200):
        mixed, _ = mix(whole, labels, 4, mixup=1.0, cutmix=1.0, random=generator(9, index))
        pasted += bool(((mixed == whole) | (mixed == whole.roll(1, 0))).all())
    assert abs(pasted - 100) < 4 * math.sqrt(50)


EVERYTHING = Augment(2, flip=True, randaugment=2, erasing=0.5, mixup=0.8, cutmix=1.0)


def task(seed: int, augment: Augment) -> Classification:
    split = images(60), torch.arange(60) % 10
    return Classification({"train": split, "val": split}, 10, 12, seed, augment=augment)


def test_augmented_batches_are_a_function_of_seed_epoch_and_index():
    def batch(seed, epoch, index, parts=1):
        micro = task(seed, EVERYTHING).micro_batches(epoch, index, parts)
        return [torch.cat(tensors) for tensors in zip(*micro, strict=True)]

    torch.manual_seed(11)
    before = torch.get_rng_state()
    first = batch(0, 2, 1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(12)
    used = task(0, EVERYTHING)
    for index in range(5):
        used.micro_batches(1, index, 1)
    for again in (batch(0, 2, 1), batch(0, 2, 1, parts=3), list(used.micro_batches(2, 1, 1)[0])):
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for other in (batch(1, 2, 1), batch(0, 1, 1), batch(0, 2, 2)):
        assert not torch.equal(first[0], other[0])
    assert first[0].dtype == torch.float32
    assert torch.allclose(first[1].sum(1), torch.ones(12))


def test_without_augmentation_images_are_normalised_and_nothing_else():
    whole, labels = images(60), torch.arange(60) % 10
    ((batch, chosen),) = task(0, Augment()).micro_batches(0, 0, 1)
    pixels = whole.double().transpose(0, 1).flatten(1)
    mean, std = pixels.mean(1), pixels.std(1, unbiased=False)
    expected = (whole.double() - mean[:, None, None]) / std[:, None, None]
    for image, label in zip(batch, chosen, strict=True):
        near = [torch.allclose(image.double(), other, atol=1e-5) for other in expected]
        assert labels[near.index(True)] == label


@pytest.mark.parametrize(
    "options",
    [
        {"crop_padding": 2}, {"flip": True}, {"randaugment": 1}, {"randaugment": 2}, {"randaugment": 1, "randaugment_magnitude": 20},
        {"erasing": 0.9}, {"mixup": 1.0}, {"cutmix": 1.0},
    ],
)  # fmt: skip
def test_every_option_does_something_of_its_own(options):
    def inputs(options: dict[str, Any]) -> Tensor:
        return task(0, Augment(**options)).micro_batches(0, 0, 1)[0][0]

    for other in ({}, {"randaugment": 1}, {"flip": True}, {"mixup": 1.0}):
        assert other == options or not torch.equal(inputs(options), inputs(other))


def test_a_constant_channel_and_float_images_survive_normalisation():
    constant = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    assert torch.equal(Normalise.of(constant, "cpu")(constant), torch.zeros(4, 1, 2, 2))
    floats = torch.randn(4, 1, 2, 2)
    assert torch.equal(Normalise.of(floats, "cpu")(floats), floats)


class Copies(TorchDispatchMode):
    """Counts the copies from the CPU to another device, and those that are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.waited = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and to is not None and to.type != "cpu":
            self.count += args[0].device.type == "cpu"
            self.waited += not kwargs.get("non_blocking")
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("what", "copies"),
    [
        ({"crop_padding": 4, "flip": True}, 2),
        ({"erasing": 0.5}, 2),
        ({"crop_padding": 4, "flip": True, "erasing": 0.5, "randaugment": 2}, 5),
    ],
)
def test_no_copy_to_a_gpu_is_waited_for(what, copies, monkeypatch):
    """On the meta device, a GPU's stand-in: one copy of the rows and one for each transform."""
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(Normalise, "plain", {})  # has values, which the meta device has not
    labels = torch.arange(64) % 10
    splits = {name: (images(64), labels) for name in ("train", "val")}
    task = Classification(splits, 10, 32, 0, device="meta", augment=Augment(**what))
    task.micro_batches(0, 0, 1)  # the epoch's order is copied with its first batch
    pinned.clear()
    with Copies() as mode:
        task.micro_batches(0, 1, 1)
    assert (mode.count, mode.waited, len(pinned)) == (copies, 0, copies)
