"""``nmrun.prune``: a trained network made N:M sparse in one shot, from some calibration inputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nmrun import oneshot
from nmrun.errors import ConfigError, RunError
from nmrun.oneshot.blocks import stages
from nmrun.oneshot.inputs import LayerMatrix, for_each, input_obstacle, output_error, watched
from nmrun.oneshot.methods import Method, Scored
from nmrun.patterns import Pattern
from nmrun.permutation.channels import Channels, holders, input_channels
from nmrun.permutation.permute import assigned_order, reorder
from nmrun.products.attention import slow_path, uncompiled
from nmrun.ranges import FLAG, check_values
from nmrun.sparsity.check import layer_report, weights_report
from nmrun.sparsity.layers import check_module
from nmrun.sparsity.select import LeftDense, select, why_none
from nmrun.sparsity.weight import LIVE

NOT_REACHED = "no calibration input reached it"


@dataclass(frozen=True)
class Pruned:
    """What :func:`prune` did to each layer. Printed, it has a line with the output error of each.

    Attributes:
        method: the method's name.
        pattern: N:M; overrides may have given layers another.
        layers: for each pruned weight ``name``, ``shape``, ``pattern``, ``dim``, ``numel``,
            ``nonzeros``, ``holds`` and ``error``. The error is ``||X V^T - X W^T||^2 / ||X
            W^T||^2``, with its calibration inputs X, the weight W and the pruned weight V.
        left_dense: the parameters that were not pruned, each with ``name``, ``shape`` and
            ``reason``.
    """

    method: str
    pattern: Pattern
    layers: list[dict[str, Any]]
    left_dense: list[LeftDense]

    def report(self) -> dict[str, Any]:
        """Describe the weights as plain data, as :meth:`nmrun.Handle.report` does."""
        return weights_report(str(self.pattern), self.layers, self.left_dense)

    def __str__(self) -> str:
        return "\n".join(oneshot.lines(self.layers))


@torch.no_grad()
def prune(
    model: nn.Module,
    batches: Iterable[Any],
    method: str = "sparsegpt",
    pattern: str | Pattern = "2:4",
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = "auto",
    overrides: Mapping[str, str | Pattern] | None = None,
    pad: bool = False,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    tell: Callable[[str], None] | None = None,
    **hyperparameters: Any,
) -> Pruned:
    """Make a trained model N:M sparse in place, without training. ::

        pruned = nmrun.prune(model, batches, method="sparsegpt", pattern="2:4")
        print(pruned)   # the output error of each layer

    Layers are pruned in the order of the network, with inputs that have passed through the pruned
    layers before them. The layers of one block of a repeated stack (a Transformer's) are pruned
    together: they see the inputs of that block while it is dense, as in the papers. Other layers are
    pruned one by one. Memory holds the calibration inputs of one block, and for each of its layers
    ``X^T X`` (inputs x inputs, float32). The same model and batches give the same bits.

    Args:
        model: any module. Linear layers, Hugging Face's Conv1D, the experts of its mixtures, and
            one- and two-dimensional convolutions without groups can be pruned. It is in evaluation
            mode meanwhile.
        batches: calibration inputs. A batch is the model's argument, a tuple of its positional
            arguments or a mapping of its keyword arguments. All tokens count, padding too.
        method: ``magnitude``, ``wanda``, ``ria`` or ``sparsegpt``.
        pattern: at most N non-zeros in every M consecutive weights along the input dimension.
        include: as in :func:`nmrun.sparsify`; so are ``exclude``, ``overrides`` and ``pad``.
        forward: called as ``forward(model, batch)``, instead of the model with the batch.
        tell: called with a line for each layer once it is pruned, such as ``print``.
        hyperparameters: the method's own, under the names of its paper.

    Raises:
        ConfigError: (a ValueError) for an unknown method, pattern or value, without batches or with
            such as the model does not take, and for a model without a weight that can be pruned.
            The model is unchanged then.
        RunError: where the weight or the inputs of a layer are not finite, or their Hessian has no
            inverse. The layers before it are pruned then.
    """
    check_module(model, "prune")
    check_values({"pad": FLAG}, {"pad": pad})
    others = inspect.signature(prune).parameters
    pruner, pattern = oneshot.build(method, hyperparameters, others), Pattern.parse(pattern)
    one = batches is None or isinstance(batches, str | Tensor | Mapping)
    calibration = [] if one else list(batches)
    if not calibration:
        raise ConfigError("prune takes a list of calibration batches, one at least: [batch]")
    layers, left_dense = _selection(model, pattern, include, exclude, overrides, pad)
    permuter = pruner if isinstance(pruner, Scored) and pruner.permute else None
    for layer in layers if permuter else ():
        layer.pattern.without_blocks(f"{method}: permute=true")
    run = forward or _call
    passes = [functools.partial(run, model, batch) for batch in calibration]
    reports: dict[str, dict[str, Any]] = {}
    width, digits = max(len(layer.name) for layer in layers), len(str(len(layers)))
    with _evaluation(model), slow_path(), uncompiled():
        for root, stage, through in stages(model, layers, passes):
            noted = called(root) if permuter else contextlib.nullcontext(set[int]())
            with watched(stage) as grams, noted as calls:
                through()
            if permuter:
                permute(stage, grams, permuter, free_channels(root, model, calls))
            for layer in stage:
                if layer.name in grams:
                    reports[layer.name] = _prune_layer(layer, pruner, grams.pop(layer.name))
                    if tell is not None:
                        count = f"[{len(reports):{digits}}/{len(layers)}]"
                        (line,) = oneshot.lines([reports[layer.name]], width)
                        tell(f"{count} {line}")
            torch.clear_autocast_cache()  # it has the weights from before
    missed = [layer for layer in layers if layer.name not in reports]
    left_dense += [LeftDense(x.name, tuple(x.weight.shape), NOT_REACHED) for x in missed]
    if not reports:
        raise ConfigError(f"no layer of this model was reached: {NOT_REACHED} ({missed[0].name})")
    in_order = [reports[layer.name] for layer in layers if layer.name in reports]
    return Pruned(pruner.name, pattern, in_order, left_dense)


def _selection(
    model: nn.Module,
    pattern: Pattern,
    include: str | Sequence[str] | None,
    exclude: str | Sequence[str] | None,
    overrides: Mapping[str, str | Pattern] | None,
    pad: bool,
) -> tuple[list[LayerMatrix], list[LeftDense]]:
    candidates, left_dense = select(model, pattern, include, exclude, overrides=overrides, pad=pad)
    if live := [c.name for c in candidates if LIVE.get(id(c.parameter)) is c.parameter]:
        raise ConfigError(f"{live[0]} is trained sparse: call finalize() on its handle first")
    modules_of: dict[int, list[nn.Module]] = {}  # a weight may be tied
    for module in model.modules():
        for parameter in module._parameters.values():
            modules_of.setdefault(id(parameter), []).append(module)
    layers = []
    for c in candidates:
        modules = modules_of[id(c.parameter)]
        if reason := next(filter(None, map(input_obstacle, modules)), ""):
            left_dense.append(LeftDense(c.name, tuple(c.parameter.shape), reason))
        else:
            layers.append(LayerMatrix(c, modules))
    if not layers:
        raise ConfigError(
            f"no weight of this model can be pruned to {pattern} ({why_none(left_dense)})"
        )
    return layers, left_dense


def _prune_layer(layer: LayerMatrix, method: Method, gram: Tensor) -> dict[str, Any]:
    matrix = layer.matrix()
    gram = gram.to(matrix.dtype)
    if not bool(gram.isfinite().all()) or not bool(matrix.isfinite().all()):
        raise RunError(f"{layer.name}: its weight or calibration inputs are not finite")
    with torch.autocast(matrix.device.type, enabled=False):
        try:
            prune_matrix = functools.partial(method.prune, pattern=layer.pattern)
            pruned = (
                for_each(prune_matrix, matrix, gram)
                if layer.stacked
                else prune_matrix(matrix, gram)
            )
        except ValueError as problem:
            raise RunError(f"{layer.name}: {problem}") from None
        error = output_error(matrix, pruned, gram)
    layer.write(pruned)
    pattern = layer.pattern.over(layer.weight.shape[layer.dim])
    return {**layer_report(layer.name, layer.weight, pattern, layer.dim), "error": error}


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation, without a cache of keys and values and with its experts one by
    one, while the context is entered."""
    training = {module: module.training for module in model.modules()}
    values = {"use_cache": False, "_experts_implementation": "eager"}
    configs = {id(c): c for m in training if (c := getattr(m, "config", None)) is not None}
    before = [
        (c, key, getattr(c, key)) for c in configs.values() for key in values if hasattr(c, key)
    ]
    model.eval()
    for config, key, _ in before:
        setattr(config, key, values[key])
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for config, key, value in before:
            setattr(config, key, value)


# --- the order of input channels, so that masks keep more of the scores ------------------------------
# As RIA does it (Zhang et al. 2024, arXiv 2402.12419, section 3.3). The outputs of the layers before
# follow, so the network computes the same function. Hidden channels of a Transformer's feed-forward
# layers can be reordered; what the residual stream carries cannot, as other blocks read it.


@contextlib.contextmanager
def called(part: nn.Module) -> Iterator[set[int]]:
    """Yields the ids of the modules in a part that are called while the context is entered."""
    ids: set[int] = set()

    def note(module: nn.Module, args: Any) -> None:
        ids.add(id(module))

    with contextlib.ExitStack() as hooks:
        for module in part.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                hooks.callback(module.register_forward_pre_hook(note).remove)
        yield ids


def free_channels(part: nn.Module, model: nn.Module, calls: Collection[int]) -> list[Channels]:
    """Channels that can be reordered inside a part of a model; where it cannot be traced, inside
    its children. Those in a tensor that the model has twice are left out, and those in a module
    that is not in ``calls``: who calls what it has inside may read these channels elsewhere."""
    count = holders(model)

    def inside(module: nn.Module) -> list[Channels]:
        try:
            found = input_channels(module) if id(module) in calls else None
        except ValueError:
            found = None
        if found is None:
            return [each for child in module.children() for each in inside(child)]
        return [
            each
            for each in {id(channels): channels for channels in found.values()}.values()
            if not each.fixed and all(count[id(site.tensor)] == 1 for site in each.sites)
        ]

    return inside(part)


def permute(
    stage: Sequence[LayerMatrix],
    grams: MutableMapping[str, Tensor],
    method: Scored,
    channels: Sequence[Channels],
) -> None:
    """Reorder, in place, channels that are read by layers of this stage alone, and ``X^T X`` of
    each with its inputs."""
    by_module = {id(layer.module): layer for layer in stage if layer.name in grams}
    for free in channels:
        readers = [site for site in free.sites if site.dim == 1]
        layers = [by_module[id(site.module)] for site in readers if id(site.module) in by_module]
        if len(layers) < len(readers) or any(site.block != 1 for site in readers):
            continue
        problem = []
        for layer in layers:
            norms = grams[layer.name].diagonal().sqrt()
            scores = method.scores(layer.matrix(), norms.to(layer.matrix().dtype))
            problem.append((scores.unflatten(1, (-1, free.size)).flatten(0, 1), layer.pattern))
        order = assigned_order(problem)
        for site in free.sites:
            reorder(site, order)
        for layer in layers:
            gram = grams[layer.name]
            # a row for each of a convolution's kernel positions
            runs = torch.arange(len(gram), device="cpu").view(-1, free.size)
            index = runs[:, order].flatten().to(gram.device)
            grams[layer.name] = gram[index][:, index]
