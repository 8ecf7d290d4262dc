"""What recipes look at in Adam's second moment: its sum, and how far a step moves it.

For step t with gradient g, ``v_t = beta2 v_(t-1) + (1 - beta2) g^2`` (Kingma and Ba 2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from nmrun.kernels.layout import local
from nmrun.optim.adam import Adam, gradients


@torch.no_grad()
def change(
    adam: Adam, params: Iterable[Tensor], logs: bool = True
) -> tuple[Tensor, Tensor, Tensor, int]:
    """AutoSwitch's sample: how far the next step would move the second moment, over all
    coordinates. For step t, ``v_t = beta2 v_(t-1) + (1 - beta2) g^2`` (Kingma and Ba 2015). So
    ``dv = (1 - beta2) (g^2 - v)`` is known from the gradients, without a copy of v. Parameters
    without a gradient do not count. Returns ``sum |dv|``; ``sum log |dv|`` and the number of
    coordinates, both where dv is not 0, and both 0 with ``logs=False``, which saves most of the
    time; and the number of all. The first three are 0-dimensional float64 tensors on the device,
    without synchronisation."""
    wanted = {id(p) for p in params}
    sizes: list[Tensor] = []
    log_sum: list[Tensor] = []
    nonzero: list[Tensor] = []
    count = 0
    for group in adam.param_groups:
        chosen = [p for p in group["params"] if id(p) in wanted and p.grad is not None]
        if not chosen:
            continue
        rest = 1 - group["betas"][1]
        for p, grad in zip(chosen, gradients(group, chosen), strict=True):
            v = adam.state.get(p, {}).get("exp_avg_sq")
            v = None if v is None else local(v)
            far = grad.square() if v is None else torch.addcmul(v, grad, grad, value=-1).abs_()
            sizes.append(far.sum().double() * rest)
            if logs:
                moved = far > 0
                nonzero.append(moved.sum().double())
                logs_of_moved = torch.where(moved, far, 1.0).log().sum(dtype=torch.float64)
                log_sum.append(logs_of_moved + nonzero[-1] * math.log(rest))
            count += grad.numel()
    zero = torch.zeros((), dtype=torch.float64, device=sizes[0].device if sizes else None)
    sums = [torch.stack(parts).sum() if parts else zero for parts in (sizes, log_sum, nonzero)]
    return sums[0], sums[1], sums[2], count


def total(adam: Adam, params: Iterable[Tensor]) -> Tensor:
    """The sum of the second moment as the next step would leave it: 0-dimensional, float64, on the
    device. Parameters without a gradient keep theirs."""
    wanted, sums = {id(p) for p in params}, []
    for group in adam.param_groups:
        chosen = [p for p in group["params"] if id(p) in wanted]
        beta2 = group["betas"][1]
        stepped = [p for p in chosen if p.grad is not None]
        for p in chosen:
            if (v := adam.state.get(p, {}).get("exp_avg_sq")) is not None:
                sums.append(local(v).sum().double() * (1.0 if p.grad is None else beta2))
        for grad in gradients(group, stepped):
            sums.append(grad.square().sum().double() * (1 - beta2))
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
