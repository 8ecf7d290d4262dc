"""Optical flow, where each pixel of a frame is in the next one, and torchvision's RAFT from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.tasks.base import Batch, Tally, generator
from nmrun.lab.tasks.items import ItemTask, Key, Place
from nmrun.papers.flow.keys import Moving

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

GAMMA = 0.8  # Teed and Deng 2020, equation 7
LARGEST = 400.0  # pixels; the authors' code leaves out what moves farther
STRIDE = 8  # the networks' sides are multiples of it
HEIGHTWISE = 0.1  # the share of training pairs that the authors' code turns upside down

Item = tuple[Any, ...]  # both frames and the flow, and what is wrong


class Frames(Protocol):
    """Pairs of frames, as torchvision's data sets of optical flow have them."""

    def __getitem__(self, row: int, /) -> Any:
        """Both frames (PIL's, RGB), and the flow (2, height, width) in pixels, x before y."""


def collated(items: list[Item]) -> tuple[Any, ...]:
    """The tensors of a micro-batch, as :class:`FlowTask` says, and what is wrong with an item or nothing."""
    problem = next((item[-1] for item in items if item[-1]), "")
    if not problem and len({item[0].shape for item in items}) > 1:
        problem = "the frames of a batch differ in size: give dataset.crop and trainer.batch_size=1, or frames of one size"
    if problem:
        return *[torch.empty(0)] * 3, problem
    return *(torch.from_numpy(np.stack(parts)) for parts in list(zip(*items, strict=True))[:3]), ""


class FlowTask(ItemTask):
    """RAFT's sequence loss (Teed and Deng 2020, arXiv 2003.12039, equation 7).

    A model gives a list of ever better flows (B, 2, H, W) for ``model(first, second)``. The frames
    (B, 3, H, W) are from -1 to 1, and their sides multiples of 8. A micro-batch is both frames,
    uint8, and the flow, float32. A training pair is a part of ``dataset.crop`` pixels, mirrored in
    every second one and turned upside down in every tenth (``dataset.flip``). That is a pure
    function of (seed, epoch, row). The splits' sources are :class:`Frames`.
    """

    items = "pairs"
    metric = "end_point_error"
    higher_is_better = False
    collate = staticmethod(collated)
    inputs: dict[str, Any] = {}
    notes = {"end_point_error": "pixels, the mean over all pixels of a split"}

    def files(self, config: Config, places: Sequence[Place]) -> Dataset[Item]:
        options = config.dataset.as_kind(Moving)
        return FrameFiles(places, options.crop, options.flip, config.seed)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return sequence_loss(flows(model, *batch[:2]), batch[2])

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        loss = error = torch.zeros((), dtype=torch.float64, device=self.device)
        pairs = pixels = 0
        for _, batch, counts in ranks.in_step(self.evaluated(split, rank, world)):
            estimates = flows(model, *batch[:2])
            if counts:
                errors = (estimates[-1] - batch[2]).square().sum(1).sqrt()
                loss = loss + sequence_loss(estimates, batch[2]) * len(errors)
                error = error + errors.double().sum()
                pairs, pixels = pairs + len(errors), pixels + errors.numel()
        return {"loss": float(loss), "error": float(error), "pairs": pairs, "pixels": pixels}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        loss, error, pairs, pixels = (
            sum(tally[key] for tally in tallies) for key in ("loss", "error", "pairs", "pixels")
        )
        return {"loss": loss / pairs, "end_point_error": error / pixels}


def flows(model: Any, first: Tensor, second: Tensor) -> list[Tensor]:
    """The flows (B, 2, height, width) of two uint8 frames, whose borders are repeated to fit."""
    height, width = first.shape[-2:]
    filled = (0, -width % STRIDE, 0, -height % STRIDE)
    frames = (
        functional.pad(frame.float() / 127.5 - 1, filled, mode="replicate")
        for frame in (first, second)
    )
    return [flow.float()[..., :height, :width] for flow in model(*frames)]


def sequence_loss(estimates: Sequence[Tensor], flow: Tensor) -> Tensor:
    """Teed and Deng 2020, equation 7: the absolute error of each flow (B, 2, H, W), the later the
    heavier. Pixels that move by 400 or more do not count, as in the authors' code.
    """
    near = flow.square().sum(1, keepdim=True) < LARGEST**2
    each = torch.stack([(near * (estimate - flow).abs()).mean() for estimate in estimates])
    powers = torch.arange(len(estimates) - 1, -1, -1, device=flow.device)
    return (GAMMA**powers * each).sum()


class FrameFiles(Dataset[Item]):
    """Pair ``(epoch, row)``, in epochs from 0 on one of its parts, some of them mirrored."""

    def __init__(
        self,
        places: Sequence[Place],
        crop: Sequence[int] | None,
        flip: bool,
        seed: int,
    ) -> None:
        self.places, self.crop, self.flip, self.seed = places, crop, flip, seed

    def __getitem__(self, key: Key) -> Item:
        epoch, number = key
        frames, row = self.places[number]
        try:
            first, second, flow = frames[row]
        except (OSError, SyntaxError, ValueError) as error:
            return None, None, None, f"pair {row} of the frames is damaged ({error})"
        images = [np.asarray(image).transpose(2, 0, 1) for image in (first, second)]
        if any(image.shape[1:] != flow.shape[1:] for image in images):
            shapes = " and ".join("x".join(map(str, a.shape[1:])) for a in (*images, flow))
            return None, None, None, f"pair {row}: frames and flow are {shapes}"
        return (
            *(self._parts([*images, flow], epoch, number) if epoch >= 0 else (*images, flow)),
            "",
        )

    def _parts(self, arrays: list[Any], epoch: int, number: int) -> list[Any]:
        random = generator(self.seed, epoch, number, 1)
        height, width = arrays[0].shape[1:]
        tall, wide = (
            min(pair) for pair in zip(self.crop or (height, width), (height, width), strict=True)
        )
        top = int(torch.randint(height - tall + 1, (), generator=random))
        left = int(torch.randint(width - wide + 1, (), generator=random))
        arrays = [array[:, top : top + tall, left : left + wide] for array in arrays]
        mirrored, overturned = torch.rand(2, generator=random).tolist()
        signs = np.ones((2, 1, 1), np.float32)
        if self.flip and mirrored < 0.5:
            arrays, signs[0] = [array[:, :, ::-1] for array in arrays], -1
        if self.flip and overturned < HEIGHTWISE:
            arrays, signs[1] = [array[:, ::-1] for array in arrays], -1
        return [*arrays[:2], arrays[2] * signs]


LEAST = 128  # pixels: four levels of correlations, of an eighth of a side


def raft(name: str, updates: int, evaluated_updates: int) -> nn.Module:
    """``raft_large`` or ``raft_small``: two frames (B, 3, H, W) to a list of flows (B, 2, H, W),
    each an update of the one before.

    In a forward pass it raises ConfigError for smaller frames than it takes.
    """
    from torchvision.models import optical_flow

    model: nn.Module = getattr(optical_flow, name)()

    def set_updates(module: nn.Module, frames: Any, options: dict[str, Any]) -> Any:
        height, width = frames[0].shape[-2:]
        if min(height, width) < LEAST:
            raise ConfigError(
                f"model={name} takes frames of {LEAST} pixels a side or more, and these have {height}x{width}"
            )
        number = updates if module.training else evaluated_updates
        return frames, {"num_flow_updates": number, **options}

    def drop_pyramid(module: Any, frames: Any, flows: Any) -> None:
        del module.corr_block.corr_pyramid  # else no copy can be made of the network

    model.register_forward_pre_hook(set_updates, with_kwargs=True)
    model.register_forward_hook(drop_pyramid)
    return model
