"""``nmrun.sparse_activations``: N:M activations in the feed-forward layers of a model.

They are forward hooks of modules and know nothing of weights, so any recipe can be used with them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.ranges import FRACTION, check_values, total_steps_of
from nmrun.sparsity.masks import hard_threshold
from nmrun.sparsity.select import compiled, several

# squared ReLUs of others by the name of their class: transformers'
SQUARED_RELUS = ("ReLUSquaredActivation",)


class SparseActivations:
    """The N:M activations of a model: which modules' outputs are pruned, and in which steps.

    :func:`sparse_activations` returns it and has the arguments. With ``pattern=None`` nothing is
    pruned, and a model without such modules is no mistake. Copies of the model prune as the model
    does, in the same phase.

    Attributes:
        pattern: N:M or V:N:M, or None.
        modules: the names of the modules.
        sparse_steps: the steps, counted from 0, in which their outputs are pruned; None: all.
        sparse: whether they are pruned now.
        ends_sparse: whether they are pruned in the last step, and thus in inference.
    """

    def __init__(
        self,
        model: nn.Module,
        pattern: str | Pattern | None,
        include: str | Sequence[str] | None = None,
        total_steps: int | None = None,
        dense_start: float = 0.0,
        dense_end: float = 0.0,
    ) -> None:
        self.pattern = None if pattern is None else Pattern.parse(pattern)
        modules = _chosen_modules(model, include)
        if self.pattern is not None and not modules:
            raise ConfigError(
                f"{self.pattern} activations are those of squared ReLUs, and this model has none: "
                "model.activation=relu2 of nmrun's GPTs, vision transformers and text encoder"
            )
        self.modules = list(modules)
        self.sparse_steps = _sparse_steps(total_steps, dense_start, dense_end)
        self._last_step = (total_steps or 1) - 1
        self.ends_sparse = self.sparse_at(self._last_step)
        self.at(0)
        self._sums: Tensor | None = None
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._hooks = [
            module.register_forward_hook(functools.partial(self._output, name))
            for name, module in modules.items()
        ]

    def at(self, step: int) -> None:
        """Set the step, counted from 0, that the next forward passes belong to."""
        self.sparse = self.sparse_at(step)

    def sparse_at(self, step: int) -> bool:
        """Whether activations are pruned in a step, counted from 0. Steps after the last count as
        the last."""
        if self.pattern is None or self.sparse_steps is None:
            return self.pattern is not None
        return min(step, self._last_step) in self.sparse_steps

    @contextlib.contextmanager
    def measured(self) -> Iterator[Tensor]:
        """While entered, forward passes add up the sums that :meth:`shares` reads.

        Yields:
            Sums over all activations, (4,), float64: their number, the number of zeros, their
            squares, and the squares of those that the pattern keeps.
        """
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        try:
            yield self._sums
        finally:
            self._sums = None

    def shares(self, sums: Tensor) -> Mapping[str, float]:
        """Turn the sums of :meth:`measured` into shares, from 0 to 1.

        Returns:
            ``activation_zeros``, the share of zeros before anything is pruned, and
            ``activation_kept``, the share of the energy (the sum of squares) that the pattern
            keeps. Without a pattern there is the first alone; without activations nothing.
        """
        number, zeros, energy, kept_energy = sums.tolist()
        if not number:
            return {}
        shares = {"activation_zeros": zeros / number}
        if self.pattern is not None:
            shares["activation_kept"] = kept_energy / energy if energy else 1.0
        return shares

    def remove(self) -> None:
        """Prune nothing from now on: take the hooks off the modules."""
        for hook in self._hooks:
            hook.remove()

    def __deepcopy__(self, memo: Any) -> SparseActivations:
        return self

    def _output(self, name: str, module: nn.Module, inputs: Any, activations: Any) -> Tensor:
        if not isinstance(activations, Tensor):
            raise ConfigError(
                f"sparse_activations: {name} gives a {type(activations).__name__}, and not a tensor: "
                "leave it out of include"
            )
        if self.pattern is None:
            pruned = activations
        else:
            if activations.shape[-1] % self.pattern.m:
                raise ConfigError(
                    f"{self.pattern} activations: {name} has {activations.shape[-1]} features, "
                    f"which {self.pattern.m} does not divide"
                )
            needed = self.sparse or self._sums is not None
            pruned = keep_largest(activations, self.pattern) if needed else activations
        if self._sums is not None:
            self._sums += _sums(activations.detach(), pruned.detach())
        return pruned if self.sparse else activations


def _sums(activations: Tensor, pruned: Tensor) -> Tensor:
    number = activations.new_full((), activations.numel(), dtype=torch.float64)
    zeros = (activations == 0).sum()
    squares = (each.double().square().sum() for each in (activations, pruned))
    return torch.stack([number, zeros.double(), *squares])


def _chosen_modules(model: nn.Module, include: str | Sequence[str] | None) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    if include is None:
        return {
            name: module
            for name, module in modules.items()
            if isinstance(module, SquaredReLU) or type(module).__name__ in SQUARED_RELUS
        }
    selection: dict[str, nn.Module] = {}
    for text in several("include", include):
        expression = compiled("include", text)
        named = {n: m for n, m in modules.items() if expression.fullmatch(n)}
        if not named:
            raise ConfigError(f"include: {text!r} is the name of no module")
        selection |= named
    return selection


def _sparse_steps(total_steps: int | None, start: float, end: float) -> range | None:
    shares = {"dense_start": start, "dense_end": end}
    check_values(dict.fromkeys(shares, FRACTION), shares)
    if not start + end < 1:
        raise ConfigError(
            f"dense_start={start:g} and dense_end={end:g} are shares of one run: less than 1 together"
        )
    if not (start or end):
        return None
    if total_steps is None:
        raise ConfigError("dense_start and dense_end need total_steps")
    # with any dense end the last step is dense: the network that is left has dense activations
    most = total_steps - 1 if end else total_steps
    steps = range(round(start * total_steps), min(round((1 - end) * total_steps), most))
    if not steps:
        raise ConfigError(
            f"dense_start={start:g} and dense_end={end:g} leave no step of {total_steps} that is sparse"
        )
    return steps


def sparse_activations(
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    *,
    include: str | Sequence[str] | None = None,
    total_steps: int | None = None,
    dense_start: float = 0.0,
    dense_end: float = 0.0,
) -> SparseActivations:
    """Prune the activations of a model's feed-forward layers to N:M in every forward pass, training
    and evaluation (Haziza et al. 2025, arXiv 2503.16672).

    ::

        activations = nmrun.sparse_activations(model, "2:4", total_steps=T, dense_end=0.1)
        for step, batch in enumerate(loader):
            activations.at(step)      # for dense_start and dense_end alone
            loss(model, batch).backward()
            ...

    With dense steps at the end the result is a plain dense network (Madhyastha et al. 2026, arXiv
    2602.06183). Without them, call this again on a model that is loaded: checkpoints do not record
    it. All products are dense here; runs of the command line on a CPU pack activations where that
    is faster.

    Args:
        pattern: at most N non-zeros in every M consecutive features of a token, the last dimension.
            ``"64:2:8"`` is V:N:M: blocks of 64 tokens.
        include: regular expressions for whole names of modules, whose outputs are pruned. None, the
            default, takes the squared ReLUs: nmrun's and those of transformers (``relu2``).
        total_steps: optimizer steps of the whole run; ``dense_start`` and ``dense_end`` need it.
        dense_start: the share of all steps at the beginning that is dense, from 0 to 1.
        dense_end: likewise, at the end.

    Raises:
        ConfigError: (a ValueError) for a wrong pattern, share, total or expression, and for a model
            without such modules. A forward pass raises it where M does not divide the features.
    """
    total = total_steps_of(total_steps)
    return SparseActivations(model, Pattern.parse(pattern), include, total, dense_start, dense_end)


class SquaredReLU(nn.Module):
    """``relu(x)^2`` (So et al. 2021, arXiv 2109.08668): x and the result have any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().square()


def keep_largest(activations: Tensor, pattern: Pattern) -> Tensor:
    """Keep the N largest magnitudes of every M features of each token; 0 elsewhere, of the same
    shape and dtype. Of V:N:M, every block of V consecutive tokens and M features first keeps the
    four features with the largest sum of magnitudes. Tokens of zeros fill up the last block.
    Ties keep the lower index, and a NaN is kept. ``activations``: (..., features). The gradient
    passes where the result is not 0; torch.compile sees a single operator. Raises ValueError
    where M does not divide the features."""
    sparse: Tensor = torch.ops.nmrun.keep_largest(activations, pattern.n, pattern.m, pattern.v)
    return sparse


@torch.library.custom_op("nmrun::keep_largest", mutates_args=())
def _keep_largest(activations: Tensor, n: int, m: int, v: int) -> Tensor:
    tokens = activations.reshape(-1, activations.shape[-1])
    filled = functional.pad(tokens, (0, 0, 0, -len(tokens) % v))
    sparse = hard_threshold(filled, Pattern(n, m, v=v))
    # a projection lies in memory as its operand does
    return sparse[: len(tokens)].contiguous().view(activations.shape)


@_keep_largest.register_fake
def _(activations: Tensor, n: int, m: int, v: int) -> Tensor:
    return activations.new_empty(activations.shape)


def _remember(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)  # the next layer saves it in any case


def _pass_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (output,) = ctx.saved_tensors
    return torch.where(output != 0, gradient, 0.0), None, None, None


_keep_largest.register_autograd(_pass_gradient, setup_context=_remember)
