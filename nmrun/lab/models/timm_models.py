"""Any network of timm, from scratch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nmrun.errors import ConfigError


def build(
    shape: tuple[int, ...], classes: int, name_in_timm: str, options: dict[str, Any] | None
) -> nn.Module:
    """Build a network by ``timm.create_model``.

    Args:
        shape: (channels, height, width) of the images.
        options: more arguments of the network. Transformers also get the image size.

    Raises:
        ConfigError: for a name or options that timm has not, and where timm is not installed.
    """
    try:
        import timm
    except ImportError:
        raise ConfigError("model=timm needs timm: pip install 'nmrun[timm]'") from None
    if not timm.is_model(name_in_timm):
        near = timm.list_models(f"*{name_in_timm}*")[:5]
        raise ConfigError(
            f"model.name_in_timm={name_in_timm}: timm has no such model"
            + (f"; it has {', '.join(near)}" if near else "")
        )
    arguments = {"num_classes": classes, "in_chans": shape[0], **(options or {})}
    try:
        try:
            model: nn.Module = timm.create_model(
                name_in_timm, img_size=tuple(shape[1:]), **arguments
            )
        except TypeError:  # most convolutional networks take any size and do not want to know it
            model = timm.create_model(name_in_timm, **arguments)
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.name_in_timm={name_in_timm} with model.options={options}: {error}"
        ) from None
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    except RuntimeError as error:
        size = "x".join(map(str, shape))
        raise ConfigError(
            f"model.name_in_timm={name_in_timm} does not take images of {size}: {error}"
        ) from None
    return model.train()
