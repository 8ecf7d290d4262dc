"""The first layer of a model and its heads, which ``exclude=auto`` leaves dense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from nmrun.sparsity.layers import axes, is_embedding

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
    """Name the parameter that multiplies the model's input.

    Args:
        model: a model whose modules are registered in the order of use.

    Returns:
        The parameter's whole name (of a bidirectional layer, the forward direction's). None where
        an embedding comes first, or where the model has no known layer.
    """
    for name, module in model.named_modules():
        if is_embedding(module):
            return None
        known = axes(module)
        own = [a for a in known if module._parameters.get(a) is not None]
        if known:
            return f"{name}.{own[0]}".lstrip(".") if own else None
    return None


def heads(model: nn.Module, layers: Sequence[str]) -> set[str]:
    """Name the layers whose output is the model's.

    A model may name its heads (``get_classifier`` of timm, ``get_output_embeddings`` of Hugging
    Face). Layers with a usual name (``fc``, ``classifier``, ``lm_head`` and the like) are heads
    too. Without either, the last layer is the head if it is linear.

    Args:
        model: the model.
        layers: the names of the modules that have a weight, in the order of the modules.

    Returns:
        Some of ``layers``.
    """
    core, prefix = _unwrapped(model)
    found = {n for n in layers if ANYWHERE.fullmatch(n.rpartition(".")[2])}
    names = {id(m): n for n, m in model.named_modules()}
    branches = [names[id(m)] for m in _declared(core) if id(m) in names]
    branches += [f"{prefix}{n}" for n in _named(core)]
    for branch in branches:
        inside = [n for n in layers if n == branch or n.startswith(f"{branch}.")]
        found.update(inside[-1:])
    if found or not layers or _headless(core):
        return found
    last = model.get_submodule(layers[-1])
    linear = isinstance(last, nn.Linear) or type(last).__name__ == "Conv1D"
    return {layers[-1]} if linear else set()


def _unwrapped(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the first module inside wrappers (DDP, PEFT) that has several children."""
    prefix = ""
    while len(children := list(model.named_children())) == 1 and list(children[0][1].children()):
        name, model = children[0]
        prefix += f"{name}."
    return model, prefix


def _headless(model: nn.Module) -> bool:
    """Say whether a model whose head was not found has none: timm's models name theirs."""
    return hasattr(model, "get_classifier") or getattr(model, "base_model", None) is model


def _declared(model: nn.Module) -> list[nn.Module]:
    """Ask the model itself for its heads."""
    answers = []
    for question in ("get_classifier", "get_output_embeddings"):
        try:
            answers.append(getattr(model, question)())
        except (AttributeError, NotImplementedError, TypeError):
            continue
    several = [a if isinstance(a, list | tuple | nn.ModuleList) else [a] for a in answers]
    return [m for some in several for m in some if isinstance(m, nn.Module)]


def _named(model: nn.Module) -> Iterator[str]:
    """Name the children that are called heads, and every member of a list of them."""
    for name, child in model.named_children():
        if CHILDREN.fullmatch(name):
            members = isinstance(child, nn.ModuleList | nn.ModuleDict)
            yield from [f"{name}.{n}" for n, _ in child.named_children()] if members else [name]
