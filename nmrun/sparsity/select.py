"""Which weights become sparse, and why the others stay dense.

``include``, ``exclude``, ``overrides`` and ``dims`` are regular expressions for whole names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn
from torch.nn.modules.conv import _ConvNd

from nmrun.errors import ConfigError, raise_all, refused
from nmrun.patterns import Pattern, PatternError
from nmrun.sparsity.layers import Candidate as Candidate
from nmrun.sparsity.layers import axes, complete, is_conv1d, is_embedding, named_parameters

Refuses = Callable[[Sequence[int], int, Pattern], str]  # (shape, outputs, pattern) -> reason


@dataclass(frozen=True)
class LeftDense:
    """A parameter of two dimensions or more that is not sparse, with the reason as a clause.
    ``shape`` is empty before a lazy module knows it."""

    name: str
    shape: tuple[int, ...]
    reason: str


def by_reason(parameters: Sequence[LeftDense]) -> str:
    """The first parameter for each reason, and how many more there are; eight at most."""
    groups: dict[str, list[LeftDense]] = {}
    for each in parameters:
        groups.setdefault(each.reason, []).append(each)
    return "; ".join(
        f"{members[0].name} {list(members[0].shape)}"
        + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        + f": {reason}"
        for reason, members in list(groups.items())[:8]
    )


def why_none(left_dense: Sequence[LeftDense]) -> str:
    """Why no weight of a model is sparse."""
    reasons = by_reason(left_dense) or "it has no such layer"
    if any(each.reason in (FIRST, HEAD) for each in left_dense):
        reasons += "; an empty exclude allows the first layer and the heads"
    return reasons


def candidates(model: nn.Module, dims: Mapping[str, int] | None = None) -> Iterator[Candidate]:
    """Every weight that multiplies an input, each once, in the order of ``named_parameters``.
    Linear layers, convolutions, attention projections, recurrent and bilinear layers and the
    experts of a mixture have such weights. One that is computed (weight_norm and the like) is
    left out. Raises ConfigError for a mistake in ``dims``, which is as in :func:`select`."""
    ids: set[int] = set()
    for entry in Options(model, dims=dims).parameters:
        if entry.may_be_sparse and id(entry.parameter) not in ids:
            ids.add(id(entry.parameter))
            yield entry


def select(
    model: nn.Module,
    pattern: Pattern,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = (),
    owned: Collection[int] | None = None,
    overrides: Mapping[str, str | Pattern] | None = None,
    refuses: Refuses | None = None,
    pad: bool = False,
    dims: Mapping[str, int] | None = None,
) -> tuple[list[Candidate], list[LeftDense]]:
    """Split the parameters of two dimensions or more into sparse ones and dense ones.

    Options are as of :func:`nmrun.sparsify`. A regular expression must match a whole name; one that
    matches nothing is a mistake. ``owned``: ids of the parameters that an optimizer updates; others
    stay dense. None, the default, does not ask. ``refuses``: a recipe's own check. Parameters may
    be on the meta device.

    Returns the sparse weights, and those left dense with the reason, in the order of
    ``named_parameters``. A weight that two layers share is sparse once, under its first name.
    Raises ConfigError for expressions that do not compile or match nothing, wrong patterns and
    dimensions, and an override that none of its layers can hold.
    """
    options = Options(model, include, exclude, overrides, dims)
    sparse: list[Candidate] = []
    dense: list[LeftDense] = []
    first_names: dict[int, str] = {}  # a parameter's first name; empty where that one is sparse
    # by override: why its first weight does not hold it; empty where one does
    fits: dict[str, str] = {}
    for entry in options.parameters:
        text, override = options.override(entry)
        ratio = override or pattern
        first = first_names.get(id(entry.parameter))
        if first == "":
            continue
        reason = options.reason(entry)
        if first is not None:
            reason = reason or f"tied to {first}"
        else:
            reason = reason or _training_obstacle(entry, owned)
            if not reason:
                reason = _size_obstacle(entry, ratio, pad)
                if override:
                    unfit = fits.get(text, f"{entry.name} with {ratio}: {reason}")
                    fits[text] = reason and unfit
                reason = reason or _recipe_obstacle(entry, ratio, refuses)
            first_names[id(entry.parameter)] = entry.name if reason else ""
        if reason:
            dense.append(LeftDense(entry.name, entry.shape, reason))
        else:
            entry.pattern = ratio.over(entry.shape[entry.dim]) if pad else ratio
            sparse.append(entry)
    raise_all([f"overrides: {text!r} fits no layer: {why}" for text, why in fits.items() if why])
    return sparse, dense


FROZEN, NOT_OWNED = "frozen", "not in the optimizer"
UNTRAINED = (FROZEN, NOT_OWNED)


def _training_obstacle(entry: Candidate, owned: Collection[int] | None) -> str:
    if owned is None or (entry.parameter.requires_grad and id(entry.parameter) in owned):
        return ""
    return NOT_OWNED if entry.parameter.requires_grad else FROZEN


def _size_obstacle(entry: Candidate, pattern: Pattern, pad: bool) -> str:
    """Why a weight of this size cannot hold the pattern, or nothing."""
    assert entry.axes is not None
    dim, outputs = entry.dim, entry.outputs
    if 0 in entry.shape:
        return "it has no weights"
    if pattern.v > 1 and outputs != (1 if dim == 0 else 0):
        return f"{pattern} is for matrices and convolutions, whose outputs lie along one dimension"
    if entry.shape[outputs] % pattern.v:
        return f"{entry.shape[outputs]} outputs are not a multiple of {pattern.v}"
    inputs = entry.shape[dim] // entry.axes.parts
    if inputs % pattern.m == 0:
        return ""
    if entry.axes.parts > 1:
        return f"{inputs} inputs of one group are not a multiple of {pattern.m}"
    reason = f"{inputs} inputs are not a multiple of {pattern.m}"
    if inputs <= pattern.n:
        return f"{reason}, and {pattern} would prune none of them"
    return "" if pad else f"{reason} (the option pad allows that)"


def _recipe_obstacle(entry: Candidate, pattern: Pattern, refuses: Refuses | None) -> str:
    if refuses is None:
        return ""
    shape = list(entry.parameter.shape)
    if isinstance(entry.module, _ConvNd) and entry.outputs == 0:
        shape[0] //= entry.module.groups  # each group of a convolution has outputs of its own
    return refuses(shape, entry.outputs, pattern)


AUTO = "auto"  # in exclude: the first layer and the heads
FIRST, HEAD = "first layer (exclude=auto)", "head (exclude=auto)"

T = TypeVar("T")
Choices = list[tuple[re.Pattern[str], T]]  # the first expression that matches counts


class Options:
    """The options of a selection (:func:`select`), and the parameters under all their names. Raises
    ConfigError for the first mistake in the options."""

    def __init__(
        self,
        model: nn.Module,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = (),
        overrides: Mapping[str, str | Pattern] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        for option, value in (("overrides", overrides), ("dims", dims)):
            if not isinstance(value, Mapping | None):
                raise ConfigError(
                    f"{option}={value!r}: it takes a dictionary by regular expressions"
                )
        self.parameters = named_parameters(model)
        named = [self._dim(text, dim) for text, dim in (dims or {}).items()]
        complete(model, self.parameters, lambda each: _first(named, each.names))
        unwanted = several("exclude", exclude)
        wanted = several("include", include)
        self._include = None if include is None else self._modules("include", wanted)
        self._exclude = self._modules("exclude", [text for text in unwanted if text != AUTO])
        # each with its own text and its pattern, None for dense
        self._overrides: Choices[tuple[str, Pattern | None]] = []
        for text, ratio in (overrides or {}).items():
            with refused(f"overrides: {text!r}: ", PatternError):
                pattern = None if ratio == "dense" else Pattern.parse(ratio)
            self._overrides += [(e, (text, pattern)) for e in self._modules("overrides", [text])]
        self._ends = _ends(model, self.parameters) if AUTO in unwanted else {}

    def override(self, parameter: Candidate) -> tuple[str, Pattern | None]:
        """The expression of the override that counts for a parameter, empty without one, and the
        pattern that it gives, None for dense."""
        return _first(self._overrides, parameter.module_names) or ("", None)

    def reason(self, parameter: Candidate) -> str:
        """Why a parameter stays dense by the options, or cannot be sparse; or an empty string."""
        modules, problem = parameter.module_names, parameter.obstacle
        is_included = self._include is not None and _match(self._include, modules)
        if parameter.adapter and not is_included:
            return "an adapter (LoRA); include names it if it is meant"
        if parameter.axes is None:
            return problem
        if self._include is not None and not is_included:
            return "not in include"
        text, override = self.override(parameter)
        if text:
            return problem if override else "dense by overrides"
        if _match(self._exclude, modules):
            return "excluded"
        ends = (self._ends[name] for name in parameter.names if name in self._ends)
        return problem or next(ends, "")

    # --- reading the options ----------------------------------------------------------------------

    def _modules(self, option: str, texts: Sequence[str]) -> list[re.Pattern[str]]:
        every = list({name for each in self.parameters for name in each.module_names})
        expressions = [compiled(option, text) for text in texts]
        for expression in expressions:
            if not _match([expression], every):
                layers = [each.module_name for each in self.parameters if each.may_be_sparse]
                listing = _listing(name or "(the model itself)" for name in layers)
                raise ConfigError(
                    f"{option}: {expression.pattern!r} matches no layer's whole name; there are "
                    f"{listing}"
                )
        return expressions

    def _dim(self, text: str, dim: int) -> tuple[re.Pattern[str], int]:
        expression = compiled("dims", text)
        matches = [each for each in self.parameters if _match([expression], each.names)]
        if not matches:
            raise ConfigError(
                f"dims: {text!r} matches no parameter of two dimensions or more; there are "
                f"{_listing(each.name for each in self.parameters)}"
            )
        for each in matches:
            if type(dim) is not int or (each.shape and dim not in range(len(each.shape))):
                raise ConfigError(
                    f"dims: {text!r}: {dim!r} is no dimension of {each.name} {list(each.shape)} "
                    f"(0 to {len(each.shape) - 1})"
                )
        return expression, dim


def compiled(option: str, text: str) -> re.Pattern[str]:
    with refused(f"{option}: {text!r} is not a regular expression: ", re.error, TypeError):
        return re.compile(text)


def _ends(model: nn.Module, parameters: Sequence[Candidate]) -> dict[str, str]:
    """The weights of the first layer and the heads, with the reason."""
    adapters = {each.module_name for each in parameters if each.adapter}
    layers = [n for n, module in model.named_modules() if axes(module) and n not in adapters]
    last, first = heads(model, layers), first_layer(model)
    ends = {each.name: HEAD for each in parameters if each.module_name in last}
    if first is not None:  # of an RNN both directions
        ends |= {p.name: FIRST for p in parameters if p.name in (first, f"{first}_reverse")}
    return ends


def several(option: str, texts: str | Sequence[str] | None) -> list[str]:
    if texts is None:
        return []
    if not isinstance(texts, Iterable):
        raise ConfigError(f"{option}={texts!r}: it takes a regular expression or a list of them")
    return [texts] if isinstance(texts, str) else list(texts)


def _listing(names: Iterable[str]) -> str:
    every = list(dict.fromkeys(names))
    return ", ".join(every[:12]) + (", ..." if len(every) > 12 else "")


def _match(expressions: Iterable[re.Pattern[str]], names: Sequence[str]) -> bool:
    return any(expression.fullmatch(name) for expression in expressions for name in names)


def _first(choices: Iterable[tuple[re.Pattern[str], T]], names: Sequence[str]) -> T | None:
    return next((value for expression, value in choices if _match([expression], names)), None)


# children of the model whose last layer writes the model's output
CHILDREN = re.compile(
    r"fc|cls|score|logits|qa_outputs|proj_out|conv_out|aux.*|(text|visual|image|audio)_projection"
    r"|(.*_)?(head|heads|classifier|predictor|output_projection)(_.*)?",
    re.IGNORECASE,
)
# layers that write an output at any depth
ANYWHERE = re.compile(
    r"lm_head|output_projection|qa_outputs|cls_score|cls_logits"
    r"|bbox_(pred|reg|ctrness)|mask_fcn_logits|kps_score_lowres"
)


def first_layer(model: nn.Module) -> str | None:
    """The parameter that multiplies the model's input, of modules in the order of use; of a
    bidirectional layer the forward direction's. None where an embedding comes first."""
    for name, module in model.named_modules():
        if is_embedding(module):
            return None
        weight_axes = axes(module)
        present = [a for a in weight_axes if module._parameters.get(a) is not None]
        if weight_axes:
            return f"{name}.{present[0]}".lstrip(".") if present else None
    return None


def heads(model: nn.Module, layers: Sequence[str]) -> set[str]:
    """Those of ``layers`` whose output is the model's. A model may name its heads
    (``get_classifier`` of timm, ``get_output_embeddings`` of Hugging Face). Layers with a usual
    name (``fc``, ``classifier``, ``lm_head``) are heads too. Without either, the last layer is
    the head if it is linear."""
    core, prefix = _unwrapped(model)
    ends = {n for n in layers if ANYWHERE.fullmatch(n.rpartition(".")[2])}
    names = {id(m): n for n, m in model.named_modules()}
    branches = [names[id(m)] for m in _declared(core) if id(m) in names]
    branches += [f"{prefix}{n}" for n in _named(core)]
    for branch in branches:
        inside = [n for n in layers if n == branch or n.startswith(f"{branch}.")]
        ends.update(inside[-1:])
    if ends or not layers or _headless(core):
        return ends
    last = model.get_submodule(layers[-1])
    return {layers[-1]} if isinstance(last, nn.Linear) or is_conv1d(last) else set()


def _unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """The first module inside wrappers (DDP, PEFT) that has several children."""
    prefix = ""
    while len(children := list(model.named_children())) == 1 and list(children[0][1].children()):
        name, model = children[0]
        prefix += f"{name}."
    return model, prefix


def _headless(model: nn.Module) -> bool:
    """Whether a model whose head was not found has none: timm's models name theirs."""
    return hasattr(model, "get_classifier") or getattr(model, "base_model", None) is model


def _declared(model: nn.Module) -> list[nn.Module]:
    answers = []
    for question in ("get_classifier", "get_output_embeddings"):
        try:
            answers.append(getattr(model, question)())
        except (AttributeError, NotImplementedError, TypeError):
            continue
    several = [a if isinstance(a, list | tuple | nn.ModuleList) else [a] for a in answers]
    return [m for group in several for m in group if isinstance(m, nn.Module)]


def _named(model: nn.Module) -> Iterator[str]:
    """The children that are called heads, and every member of a list of them."""
    for name, child in model.named_children():
        if CHILDREN.fullmatch(name):
            members = isinstance(child, nn.ModuleList | nn.ModuleDict)
            yield from [f"{name}.{n}" for n, _ in child.named_children()] if members else [name]
