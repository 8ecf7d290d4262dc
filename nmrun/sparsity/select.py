"""Which weights become sparse, and why the others stay dense."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.patterns import Pattern


@dataclass(frozen=True)
class Candidate:
    """A weight that multiplies an input: ``module.<attribute>``, whose groups run along ``dim``; ``pattern`` once it is chosen."""

    module_name: str
    module: nn.Module
    attribute: str
    dim: int
    pattern: Pattern | None = None

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def outputs(self) -> int:
        return 1 - self.dim

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.attribute)


@dataclass(frozen=True)
class LeftDense:
    """A weight that could have been sparse and is not, with the reason."""

    name: str
    shape: tuple[int, ...]
    reason: str


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """Every weight of a linear layer, convolution or attention projection, in the order of ``named_modules``.

    Groups run along the input dimension: 1 for (out, in) and (out, in / groups, kernel...), 0 for Hugging Face's ``Conv1D``,
    whose weight is stored (in, out). Transposed convolutions have no candidate.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for attribute in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if getattr(module, attribute, None) is not None:
                    yield Candidate(name, module, attribute, 1)
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield Candidate(name, module, "weight", 1)
        elif hasattr(module, "nf") and any(k.__name__ == "Conv1D" for k in type(module).__mro__):
            # FSDP makes subclasses
            yield Candidate(name, module, "weight", 0)


def select(
    model: nn.Module,
    pattern: Pattern,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] = (),
    owned: Collection[int] | None = None,
    overrides: Mapping[str, str | Pattern] | None = None,
    refuses: Callable[[Sequence[int], int, Pattern], str] | None = None,
    pad: bool = False,
) -> tuple[list[Candidate], list[LeftDense]]:
    """Split the candidates into those that will be sparse and those left dense, with the reason.

    ``include`` and ``exclude`` are regular expressions that must match a module's whole name (``layer3\\..*``, ``fc``);
    ``owned`` the ids of the parameters that an optimizer updates (default: what is trained does not matter).
    ``overrides`` gives layers another pattern, or ``"dense"``, by such expressions; the first that matches counts, and more
    than ``exclude``.
    ``refuses(shape, dim, pattern)`` is a recipe's own reason against a weight, or empty.
    ``pad`` lets the last group of every weight be short (see :meth:`Pattern.over`), so that M need not divide the inputs.
    Raises ConfigError for an expression that matches no candidate, since that is a typo nine times in ten.
    """
    every = list(candidates(model))
    wanted = None if include is None else _compiled("include", include, every)
    unwanted = _compiled("exclude", exclude, every)
    special = list(zip(_compiled("overrides", list(overrides or ()), every), (overrides or {}).values(), strict=True))
    users: dict[int, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(f"{module_name}.{attribute}".lstrip("."))

    sparse, dense = [], []
    for candidate in every:
        weight = candidate.tensor
        own = next((ratio for r, ratio in special if r.fullmatch(candidate.module_name)), None)
        chosen = None if own == "dense" else Pattern.parse(own or pattern)
        others = [name for name in users.get(id(weight), []) if name != candidate.name]
        if wanted is not None and not any(r.fullmatch(candidate.module_name) for r in wanted):
            reason = "not in include"
        elif own is None and any(r.fullmatch(candidate.module_name) for r in unwanted):
            reason = "excluded"
        elif chosen is None:
            reason = "dense by overrides"
        elif others:
            reason = f"tied to {others[0]}"
        elif not isinstance(weight, nn.Parameter):
            reason = "its weight is computed (parametrized already)"
        elif owned is not None and not weight.requires_grad:
            reason = "frozen"
        elif owned is not None and id(weight) not in owned:
            reason = "not in the optimizer"
        elif weight.dim() < 2:
            reason = "its parameter is flattened (FullyShardedDataParallel): use fully_shard"
        elif reason := _unfit(weight.shape[candidate.dim], chosen, pad):
            pass
        elif not (reason := refuses(weight.shape, candidate.dim, chosen) if refuses else ""):
            sparse.append(replace(candidate, pattern=chosen.over(weight.shape[candidate.dim]) if pad else chosen))
            continue
        dense.append(LeftDense(candidate.name, tuple(weight.shape), reason))
    return sparse, dense


def _unfit(inputs: int, pattern: Pattern, pad: bool) -> str:
    """Why a dimension of this size cannot hold the pattern, or an empty string."""
    if inputs % pattern.m == 0:
        return ""
    reason = f"{inputs} inputs are not a multiple of {pattern.m}"
    if inputs <= pattern.n:
        return f"{reason}, and {pattern} would prune none of them"
    return "" if pad else f"{reason} (the option pad allows that)"


def _compiled(option: str, texts: str | Sequence[str], every: list[Candidate]) -> list[re.Pattern[str]]:
    compiled, problems = [], []
    for text in [texts] if isinstance(texts, str) else texts:
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            problems.append(f"{option}: {text!r} is not a regular expression: {error}")
            continue
        if not any(compiled[-1].fullmatch(c.module_name) for c in every):
            names = ", ".join(c.module_name or "(the model itself)" for c in every[:12]) + (", ..." if len(every) > 12 else "")
            problems.append(f"{option}: {text!r} matches no layer's whole name; there are {names}")
    if problems:
        raise ConfigError(problems)
    return compiled
