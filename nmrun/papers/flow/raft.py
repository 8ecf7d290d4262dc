"""torchvision's RAFT (Teed and Deng 2020, arXiv 2003.12039), from scratch."""

from __future__ import annotations

from typing import Any

from torch import nn

from nmrun.errors import ConfigError

LEAST = 128  # pixels: four levels of correlations, of an eighth of a side


def build(name: str, updates: int, evaluated_updates: int) -> nn.Module:
    """Build a network: two frames (B, 3, H, W) to a list of flows (B, 2, H, W), each an update of
    the one before.

    Args:
        name: ``raft_large`` or ``raft_small``.

    Raises:
        ConfigError: where the network is given smaller frames than it takes.
    """
    from torchvision.models import optical_flow

    model: nn.Module = getattr(optical_flow, name)()

    def counted(module: nn.Module, frames: Any, options: dict[str, Any]) -> Any:
        height, width = frames[0].shape[-2:]
        if min(height, width) < LEAST:
            raise ConfigError(
                f"model={name} takes frames of {LEAST} pixels a side or more, and these have {height}x{width}"
            )
        number = updates if module.training else evaluated_updates
        return frames, {"num_flow_updates": number, **options}

    def forgotten(module: Any, frames: Any, flows: Any) -> None:
        del module.corr_block.corr_pyramid  # else no copy can be made of the network

    model.register_forward_pre_hook(counted, with_kwargs=True)
    model.register_forward_hook(forgotten)
    return model
