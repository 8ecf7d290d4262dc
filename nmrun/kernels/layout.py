"""How tensors lie in memory, and what the compiled kernels take: what one optimizer step with a rule
reads and writes for one weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nmrun.patterns import Pattern
from nmrun.rule import Rule

LARGEST = 1 << 30  # weights of a tensor for Triton: offsets are 32 bits, also in a padded last tile


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor (no copy); any other tensor as it is."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def part_like(value: Any, like: Any) -> Any:
    """Shard a whole tensor, the same on every rank, like a parameter: with its placement and memory
    of its own. Where the parameter is not sharded, and of other values, ``value`` itself."""
    sharded = hasattr(like, "_local_tensor") and isinstance(value, Tensor)
    if not sharded or hasattr(value, "_local_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None).clone()


def has_memory(tensor: Tensor) -> bool:
    """Whether a kernel may read this tensor's memory by itself: a plain tensor, whose operations
    nobody looks at (torch.compile, tracers, ``torch.func``, forward mode, a dispatch mode)."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return False
    kind = type(tensor)
    return kind is Tensor or issubclass(kind, nn.Parameter)


def is_transformed() -> bool:
    """Whether ``torch.func`` differentiates or maps over what is computed now, or
    :func:`is_forward_mode`; compilers see to that themselves."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or is_forward_mode()


def is_forward_mode() -> bool:
    """Whether derivatives are taken along with what is computed now (``torch.func.jvp``,
    ``torch.autograd.forward_ad``); compilers see to that themselves."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def stored_alike(*tensors: Tensor) -> bool:
    """Whether tensors of one shape have no gaps and one order: all contiguous or all channels last."""
    orders = (torch.contiguous_format, torch.channels_last)
    return any(all(t.is_contiguous(memory_format=order) for t in tensors) for order in orders)


def as_stored(dim: int, *tensors: Tensor) -> tuple[int, list[Tensor]]:
    """Tensors that are :func:`stored_alike` as they lie in memory, channels last behind, and where
    their ``dim`` is then."""
    if all(t.is_contiguous() for t in tensors):
        return dim, list(tensors)
    return (0, 3, 1, 2)[dim], [t.permute(0, 2, 3, 1) for t in tensors]


def filled(weight: Tensor, pattern: Pattern, dim: int) -> Tensor:
    """``weight`` itself where M divides ``weight.shape[dim]``. A pattern that is
    :meth:`Pattern.over` this size gives a copy with zeros up to whole groups. Raises ValueError
    for any other size."""
    size = weight.shape[dim] if weight.dim() else 1
    if weight.dim() and size % pattern.m == 0:
        return weight
    if weight.dim() == 0 or size != pattern.length:
        raise ValueError(
            f"{pattern} needs dimension {dim} to be a multiple of {pattern.m}; it is {size}"
        )
    missing = list(weight.shape)
    missing[dim] = -size % pattern.m
    return torch.cat([weight, weight.new_zeros(missing)], dim)


class Update(NamedTuple):
    """The recipe's part of one step for one weight: ``dense`` is what the step moves, ``projected``
    where its projection goes, ``dim`` the dimension that groups run along."""

    dense: Tensor
    projected: Tensor
    dim: int
    pattern: Pattern
    rule: Rule


class Operands(NamedTuple):
    """An :class:`Update` with Adam's tensors: ``second`` is the second moment, or with ``frozen`` a
    constant denominator; ``steps`` counts this step too."""

    update: Update
    grad: Tensor
    first: Tensor
    second: Tensor
    steps: float
    frozen: bool

    @property
    def all(self) -> list[Tensor]:
        """The tensors of the weight's shape, in the kernels' order."""
        return [self.update.dense, self.grad, self.first, self.second, self.update.projected]


def decoupled(group: dict[str, Any]) -> bool:
    """Whether a parameter group's weight decay is AdamW's."""
    return bool(group.get("decoupled_weight_decay", False))


def scalars(group: dict[str, Any], steps: float, rule: Rule) -> list[float]:
    """What the kernels need of a parameter group for step number ``steps`` (from 1), in double
    precision."""
    (beta1, beta2), lr, weight_decay = group["betas"], group["lr"], group["weight_decay"]
    return [
        1 - lr * weight_decay,
        0.0 if decoupled(group) else weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**steps) ** 0.5,
        group["eps"],
        -lr / (1 - beta1**steps),
        rule.pruned_gradient_decay,
        rule.pruned_gradient_factor,
        rule.pruned_weight_factor,
    ]
