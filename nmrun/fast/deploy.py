"""``nmrun.deploy``: the N:M weights of a trained model packed in place, each by the fastest right
way on the machine at hand. Its dense layers are computed by oneDNN where that is faster than torch's
default.

A path is a layer that computes the same with a packed weight. It is tested before it is timed, on
the weight that it gets and at the sizes that the sample brings; where the dense layer is faster,
that stays.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.errors import ConfigError, first_line
from nmrun.fast import measurement
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu import probe as on_cpu
from nmrun.fast.cpu.kernels import bf16, blocks, int8, products
from nmrun.fast.cpu.onednn import Bf16OneDNNLinear, DenseInt8Linear, OneDNNLinear
from nmrun.fast.cpu.packed_convolution import (
    Bf16Convolution,
    BlockConvolution,
    PackedConvolution,
)
from nmrun.fast.cpu.packed_linear import (
    Bf16Linear,
    BitmapLinear,
    BlockLinear,
    Int8BlockLinear,
    Int8Linear,
    PackedLinear,
)
from nmrun.fast.fused import exact_ways, fusable, rough_ways
from nmrun.fast.gpu import probe as on_gpu
from nmrun.fast.gpu import semi_structured
from nmrun.fast.gpu.linear import SemiStructuredLinear
from nmrun.fast.measurement import (
    BF16,
    BF16_BITMAP,
    BF16_BLOCKS,
    DENSE_BF16,
    DENSE_INT8,
    DENSE_PATHS,
    FASTER,
    INT8,
    INT8_BLOCKS,
    ONEDNN,
    Choice,
)
from nmrun.fast.sites import (
    ConvolutionSite,
    Place,
    Site,
    devices,
    install,
    replace,
    sites,
    watch,
)
from nmrun.patterns import Pattern
from nmrun.ranges import FLAG, Check, check_values, number, plain
from nmrun.sparsity.layers import check_module
from nmrun.sparsity.weight import LIVE

SIZES = (*range(2, 17), 32, 64)  # M that are looked for
TOLERANCE = 0.05  # of int8: normal operands are 0.01 off, outliers among the inputs make it more
# makes the layer of a weight (outputs, inputs) and its bias, or of a place
Path = Callable[[Tensor, Tensor | None], nn.Module]
Way = Callable[[], nn.Module]


def deploy(
    model: nn.Module,
    sample: Any,
    precision: str | None = None,
    tolerance: float = TOLERANCE,
    compile: bool = False,
) -> list[Choice]:
    """Make a trained N:M model faster, in place: replace each layer by the fastest one that is right
    on this machine.

    Each candidate is compared with the dense layer in float32 and timed on the inputs of the
    sample. The dense layer stays where it is the fastest. Results differ from its results by
    rounding. Every layer may have a pattern of its own; it is found in the weight. The candidates:

    - On the CPU, linear layers, Hugging Face's ``Conv1D`` and the projections of
      ``nn.MultiheadAttention`` become :class:`~nmrun.fast.cpu.packed_linear.PackedLinear`, which
      holds the non-zeros and their columns alone: 1.25 N/M of the dense bytes in float32, 1.5 N/M
      in bfloat16. In bfloat16 :class:`~nmrun.fast.cpu.packed_linear.Bf16Linear` is another candidate,
      on processors with AVX512-BF16, and :class:`~nmrun.fast.cpu.packed_linear.BlockLinear` for
      V:N:M weights, which multiplies by AMX where that is. With AMX
      :class:`~nmrun.fast.cpu.packed_linear.BitmapLinear` is tried for few tokens.
    - On the CPU, ``nn.Conv2d`` becomes a
      :class:`~nmrun.fast.cpu.packed_convolution.PackedConvolution` in float32, which needs a batch
      of images to be fast, or a ``Bf16Convolution`` in bfloat16 on processors with AVX512-BF16. It
      is timed against the faster of torch's two memory layouts. In bfloat16 one of a single position
      with a V:N:M weight may become a ``BlockConvolution``. Where one is packed, the weights of those
      that stay dense are laid out with channels last, as the packed ones' outputs are.
    - On CUDA, linear layers that fit into 2:4 become
      :class:`~nmrun.fast.gpu.linear.SemiStructuredLinear`, in bfloat16 or float16.
    - On the CPU, dense linear layers become :class:`~nmrun.fast.cpu.onednn.OneDNNLinear`, which in
      bfloat16 holds the weight twice. Attention between packed projections, and GELU, become layers
      of :mod:`nmrun.fast.fused`.

    Args:
        model: a trained model with plain parameters (after ``handle.finalize()``). It is set to
            evaluation.
        sample: an input as in use: a tensor, a tuple of positional arguments, a dict of keyword
            arguments, or a function that calls the model (``lambda: model.generate(prompt)``). The
            times of all calls that a layer gets in it are added.
        precision: ``"int8"`` adds candidates for linear layers on the CPU:
            :class:`~nmrun.fast.cpu.packed_linear.Int8Linear`, packed, ``Int8BlockLinear`` for V:N:M,
            :class:`~nmrun.fast.cpu.onednn.DenseInt8Linear`, oneDNN's with the zeros; for
            float32 weights also the packed ones of bfloat16 and oneDNN's. Attention may then multiply
            in bfloat16. None, the default: layers keep their precision.
        tolerance: the largest error of such a layer on the tokens of the sample, from 0 to 1, as a
            share of the output's norm. A layer with a larger one keeps its precision.
        compile: also call ``model.compile()``; on a GPU with CUDA graphs, and then layers are timed
            in CUDA graphs too. Inputs of another shape are compiled anew.

    Returns:
        One choice for each weight: its path, or None for torch's dense layer, and the reason with
        the times in milliseconds. Then those of attention and GELU, which are ``always_dense``.

    Raises:
        ConfigError: where a weight is still in training or on meta, for a model or sample of another
            kind, and for ``precision="int8"`` on a processor or device without such products. No
            layer is changed then.
    """
    _check(model, precision, tolerance, compile)
    for name, parameter in model.named_parameters():
        if LIVE.get(id(parameter)) is parameter:
            raise ConfigError(f"{name} is in training: call finalize() on its handle, then deploy")
    by_module, reasons = sites(model)
    all_sites = [site for module_sites in by_module.values() for site in module_sites]
    model.eval()
    with torch.no_grad():
        watch(model, by_module, sample)
        algorithms: dict[Any, str] = {}
        for site in all_sites:
            _find(site, compile, algorithms)
            if precision and site.given:
                try_int8(site, site.pattern is not None, tolerance)
                site.notes += _try(site, _below(site), tolerance)
        choices = _choose(all_sites, compile)
        for module, module_sites in by_module.items():
            if any(site.layer is not None for site in module_sites):
                install(model, module, module_sites)
        if any(isinstance(s, ConvolutionSite) and s.layer is not None for s in all_sites):
            last = partial(Tensor.contiguous, memory_format=torch.channels_last)
            for module in model.modules():
                if isinstance(module, nn.Conv2d):  # what packed ones give it lies so already
                    module.weight.data = last(module.weight.data)
        places = fusable(model, sample, apart=precision is not None)
        for first, *others_alike in _alike(places):
            first.notes += _try(first, exact_ways(first))
            for place in others_alike:
                place.notes, place.candidates = [*first.notes], copy.deepcopy(first.candidates)
        if precision is not None:
            for place in places:
                place.notes += _try(place, rough_ways(place), tolerance)
        others = _choose(places)
        for place in places:
            if place.layer is not None:
                replace(model, place.module, place.layer)
    if compile:
        model.compile(mode="reduce-overhead" if "cuda" in devices(model) else None)
    dense = (Choice(name, None, reason) for name, reason in reasons.items())
    return [*choices, *dense, *(choice for choice in others if choice.reason)]


PRECISION = Check(f"{INT8}, or None", lambda value: value in (None, INT8))


def _check(model: nn.Module, precision: str | None, tolerance: float, compile: bool) -> None:
    """Raise ConfigError, in one line, for what is no module and a precision that cannot be had."""
    check_module(model, "deploy")
    if "meta" in devices(model):
        raise ConfigError("the model is on meta: load its weights first")
    check_values(
        {"precision": PRECISION, "tolerance": number(0, 1), "compile": FLAG},
        {"precision": precision, "tolerance": plain(tolerance), "compile": compile},
    )
    if precision and (why := int8.KERNELS.obstacle()):
        raise ConfigError(f"precision={INT8}: {why}")
    elsewhere = devices(model) - {"cpu"}
    if precision and elsewhere:
        raise ConfigError(f"precision={INT8} is for CPUs; the model is on {min(elsewhere)}")


def try_int8(site: Site, sparse: bool, tolerance: float) -> None:
    """Make candidates of the int8 layers of a linear site whose outputs for the tokens seen there are
    near enough, and note how far off they are.

    Args:
        site: one that has seen an input.
        sparse: its weight is N:M.
        tolerance: the error's share of the outputs' norm.
    """
    ways: dict[str, Path] = {DENSE_INT8: DenseInt8Linear.of} if onednn.available_int8() else {}
    site.notes += _try(site, _of(site, ways | ({INT8: Int8Linear.of} if sparse else {})), tolerance)


def _try(place: Place, ways: Mapping[str, Way], tolerance: float | None = None) -> list[str]:
    """Make candidates of the layers that are right: within rounding for inputs of all shapes, or, with a
    tolerance, near enough for inputs of the sample. Returns what was found beside that."""
    notes = []
    for name, make in ways.items():
        try:
            layer = make()
            right, note = _check_layer(place, layer, tolerance)
        except (*measurement.ERRORS, MemoryError) as error:
            right, note = False, first_line(error)
        if right:
            place.candidates[name] = layer
        if note:
            notes.append(f"{name} {note}" if right else f"{name}: {note}")
    return notes


def _check_layer(place: Place, layer: nn.Module, tolerance: float | None) -> tuple[bool, str]:
    right, note = True, ""
    for shape in place.shapes:
        if tolerance is not None and shape not in place.given:
            continue
        inputs = place.inputs(shape) if tolerance is None else place.given[shape]
        expected = place.exact(*inputs)
        if tolerance is None:
            note = measurement.fault(partial(layer, *inputs), expected, place.roundings)
            right = not note
        else:
            right, note = measurement.nearness(layer(*inputs).float(), expected, tolerance)
        if not right:
            break
    return right, note


def _of(site: Site, kinds: Mapping[str, Path]) -> dict[str, Way]:
    weight = site.weight.contiguous()
    return {name: partial(of, weight, site.bias) for name, of in kinds.items()}


def _in_bf16(site: Site) -> dict[str, Path]:
    """The packed layers of bfloat16 for the weight of a linear site."""
    if site.device.type != "cpu" or bf16.KERNELS.obstacle():
        return {}
    ways: dict[str, Path] = {BF16: Bf16Linear.of}
    if _has_blocks(site):
        ways[BF16_BLOCKS] = BlockLinear.of
    if min(tokens for tokens, _ in site.shapes) <= blocks.PANEL and not blocks.bitmaps_obstacle():
        ways[BF16_BITMAP] = BitmapLinear.of
    return ways


def _below(site: Site) -> dict[str, Way]:
    """What int8 allows for beside its own layers: those of blocks, and of a float32 weight bfloat16."""
    low = site.dtype == torch.float32
    ways: dict[str, Path] = {}
    if low and torch.bfloat16 in onednn.dtypes():
        ways[DENSE_BF16] = Bf16OneDNNLinear
    if site.pattern is not None:
        ways |= {INT8_BLOCKS: Int8BlockLinear.of} if _has_blocks(site) else {}
        ways |= _in_bf16(site) if low else {}
    return _of(site, ways)


def _has_blocks(site: Site) -> bool:
    return blocks.height_of(site.rows != 0) is not None


def pattern_of(weight: Tensor) -> Pattern | None:
    """The sparsest N:M that a matrix (outputs, inputs) holds, of those the one with the smallest M;
    None for a dense one.
    """
    sparsest: Pattern | None = None
    filled = (weight != 0).to(torch.uint8)
    for m in (m for m in SIZES if m <= weight.shape[1]):
        groups = F.pad(filled, (0, -weight.shape[1] % m)).unflatten(1, (-1, m))
        n = max(int(groups.sum(2, dtype=torch.uint8).amax()), 1)
        if n < m and (sparsest is None or n * sparsest.m < sparsest.n * m):
            sparsest = Pattern(n, m)
    return sparsest


def paths(device: torch.device, dtype: torch.dtype, pattern: Pattern) -> dict[str, Path]:
    """The ways there are for a weight.

    Raises:
        ValueError: in one line, why there are none.
    """
    short = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        if dtype not in products.DTYPES:
            raise ValueError(f"{short}: packed weights on the CPU are float32 or bfloat16")
        if why := products.KERNELS.obstacle():
            raise ValueError(why)
        return {"packed": PackedLinear.of}
    if why := on_gpu.obstacle(device):
        raise ValueError(why)
    if dtype not in measurement.ALLOWED:
        raise ValueError(f"{short}: 2:4 products are of bfloat16 or float16")
    if not pattern.fits_2_4:
        raise ValueError(f"{pattern} does not fit into 2:4, all that this GPU multiplies")
    return {name: partial(SemiStructuredLinear, path=name) for name in semi_structured.PATHS}


def _of_convolution(site: ConvolutionSite, pattern: Pattern) -> dict[str, Way]:
    """As :func:`paths`, for a convolution."""
    if site.device.type != "cpu":
        raise ValueError("torch has no sparse convolution")
    paths(site.device, site.weight.dtype, pattern)
    kinds: dict[str, Any] = {"packed": PackedConvolution}
    if site.dtype == torch.bfloat16:
        if why := bf16.KERNELS.obstacle():
            raise ValueError(f"bfloat16: {why}")
        kinds = {BF16: Bf16Convolution}
        if site.window.positions == 1 and site.window.padding == (0, 0) and _has_blocks(site):
            kinds[BF16_BLOCKS] = BlockConvolution
    weight = site.weight.contiguous()
    return {n: partial(kind.of, weight, site.window, site.bias) for n, kind in kinds.items()}


def _dense(site: Site) -> dict[str, Way]:
    """As :func:`paths`, for what stays dense."""
    if isinstance(site, ConvolutionSite) or site.device.type != "cpu":
        return {}
    worth = site.weight.numel() * max(tokens for tokens, _ in site.shapes) >= on_cpu.SMALLEST
    if site.dtype not in onednn.dtypes() or not worth:
        return {}
    return {ONEDNN: partial(OneDNNLinear, site.weight, site.bias)}


def _find(site: Site, graph: bool, algorithms: dict[Any, str]) -> None:
    """Find the kind of a weight and its right candidates, or note why there are none. ``algorithms`` are
    those of weights alike, which are looked for once."""
    if site.dtype is None:
        site.notes = ["the sample does not call it as a layer"]
        return
    site.pattern = pattern_of(site.rows)
    if site.weight.dtype != site.dtype:
        site.notes = [f"its weight is {site.weight.dtype}, its input {site.dtype}"]
        return
    ways = _dense(site)
    try:
        if isinstance(site, ConvolutionSite):
            ways |= _of_convolution(site, site.pattern) if site.pattern else {}
        elif site.pattern:
            kinds = paths(site.device, site.dtype, site.pattern)
            if site.dtype == torch.bfloat16:
                kinds |= _in_bf16(site)
            for name, make in _of(site, kinds).items():
                ways[name] = partial(_with_algorithm, site, name, make, graph, algorithms)
    except ValueError as error:
        site.notes = [str(error)]
    site.notes += _try(site, ways)
    if not (site.pattern or site.candidates):
        site.notes.insert(0, "its weight is not N:M")


def _with_algorithm(
    site: Site, name: str, make: Way, graph: bool, algorithms: dict[Any, str]
) -> nn.Module:
    layer = make()
    if isinstance(layer, SemiStructuredLinear):
        key = site.weight.shape, site.device, site.dtype, *site.shapes, site.bias is None, name
        if key not in algorithms:
            (common, _), *_ = site.shapes.most_common(1)
            layer.choose(site.inputs(common)[0], site.weight, graph)
        layer.path = algorithms.setdefault(key, layer.path)
    return layer


def _choose(places: Sequence[Place], graph: bool = False) -> list[Choice]:
    """Set the layer of each place that one is faster at, and say why."""
    choices = dict[str, Choice]()
    for group in _alike(places):
        path, timing = _fastest(group, graph) if group[0].candidates else (None, "")
        for place in group:
            place.layer = None if path is None else place.candidates[path]
            reason, is_weight = (
                "; ".join(filter(None, (timing, *place.notes))),
                isinstance(place, Site),
            )
            choices[place.name] = Choice(place.name, path, reason, always_dense=not is_weight)
    return [choices[place.name] for place in places]


def _alike(places: Sequence[Place]) -> list[list[Place]]:
    """Places in groups that share their times."""
    groups = defaultdict[Any, list[Place]](list)
    for place in places:
        groups[place.timing_key].append(place)
    return [*groups.values()]


def _fastest(group: Sequence[Place], graph: bool) -> tuple[str | None, str]:
    """The path that does all that the sample brought in the least time, None for what is there, and the
    times of the commonest call."""
    total, timing = times(group, graph)
    candidates = group[0].candidates
    best = min(candidates, key=lambda name: total[name])
    # packed has to beat all that is dense, any other what torch calls, by more than noise
    packed = isinstance(group[0], Site) and best not in DENSE_PATHS
    rivals = [n for n in total if n not in candidates or (packed and n in DENSE_PATHS)]
    ratio = min(total[name] for name in rivals) / total[best]
    return (best if ratio > (1 if packed else 1 / FASTER) else None), f"{timing} ({ratio:.2f}x)"


def times(group: Sequence[Place], graph: bool = False) -> tuple[dict[str, float], str]:
    """The milliseconds that each way takes for all calls of the sample, and in words those of the
    commonest call. Weights alike take turns, since in the model, too, others come in between and a
    weight may have left the caches.
    """
    place, total, timing = group[0], defaultdict[str, float](float), ""
    (common, _), *_ = place.shapes.most_common(1)
    for shape, count in place.shapes.items():
        ways = [each.ways(*each.inputs(shape)) for each in group]
        durations = milliseconds(
            {name: [way[name] for way in ways] for name in ways[0]},
            place.device,
            graph,
        )
        for name, ms in durations.items():
            total[name] += ms * count
        if shape == common:
            calls = "" if len(place.shapes) == 1 else f", one of {place.shapes.total()} calls"
            listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in durations.items())
            timing = f"{place.about(common)}{calls}: {listed}"
    return total, timing


def milliseconds(
    arms: Mapping[str, Sequence[Callable[[], object]]], device: torch.device, graph: bool = False
) -> dict[str, float]:
    """The milliseconds of one call of each arm, all of them in a row, on a GPU as a CUDA ``graph`` or
    called one by one; on a CPU arms take turns."""
    rows = {name: partial(_all, calls) for name, calls in arms.items()}
    if device.type == "cuda":
        with measurement.on(device):
            durations = [semi_structured.milliseconds(row, graph=graph) for row in rows.values()]
    else:
        durations = on_cpu.side_by_side(*rows.values())
    return {name: ms / len(arms[name]) for name, ms in zip(arms, durations, strict=True)}


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
