"""``nmrun.deploy``: the N:M weights of a trained model packed in place, each by the fastest right
way on the machine at hand. Its dense layers are computed by oneDNN where that is faster than torch's
default.

A path is a layer that computes the same with a packed weight. It is tested before it is timed, on
the weight that it gets and at the sizes that the sample brings; where the dense layer is faster,
that stays.
"""

from __future__ import annotations

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
from nmrun.fast.fused import fuse
from nmrun.fast.gpu import probe as on_gpu
from nmrun.fast.gpu import semi_structured
from nmrun.fast.gpu.linear import SemiStructuredLinear
from nmrun.fast.measurement import (
    BF16,
    BF16_BITMAP,
    BF16_BLOCKS,
    DENSE,
    DENSE_BF16,
    DENSE_INT8,
    FASTER,
    INT8,
    INT8_BLOCKS,
    ONEDNN,
    Choice,
)
from nmrun.fast.sites import ConvolutionSite, Site, devices, install, sites, watch
from nmrun.patterns import Pattern
from nmrun.ranges import Check, check_values, number, plain
from nmrun.sparsity.layers import check_module
from nmrun.sparsity.weight import LIVE

SIZES = (*range(2, 17), 32, 64)  # M that are looked for
TOLERANCE = 0.05  # of int8: normal operands are 0.01 off, outliers among the inputs make it more
# makes the packed layer of a weight (outputs, inputs) and its bias
Path = Callable[[Tensor, Tensor | None], nn.Module]


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
    _check(model, precision, tolerance)
    for name, parameter in model.named_parameters():
        if LIVE.get(id(parameter)) is parameter:
            raise ConfigError(f"{name} is in training: call finalize() on its handle, then deploy")
    by_module, reasons = sites(model)
    all_sites = [site for module_sites in by_module.values() for site in module_sites]
    model.eval()
    choices, groups, notes = dict[str, Choice](), dict[Any, list[Site]](), dict[str, str]()
    algorithms: dict[Any, str] = {}
    with torch.no_grad():
        watch(model, by_module, sample)
        for site in all_sites:
            reason, pattern = _try(site, compile, algorithms)
            notes[site.name] = ""
            if precision and site.tokens is not None:
                sparse = pattern is not None
                for near, note in (
                    int8_layers(site, sparse, tolerance),
                    _near(site, _below(site, sparse), tolerance),
                ):
                    notes[site.name] += f"; {note}" if note else ""
                    site.candidates |= near
            choices[site.name] = Choice(site.name, None, reason)
            if site.candidates:
                groups.setdefault((*site.timing_key, pattern, tuple(site.candidates)), []).append(
                    site
                )
        for (*_, pattern, _), group in groups.items():
            path, timing = _fastest(group, compile)
            for site in group:
                site.layer = None if path is None else site.candidates[path]
                reason = f"{pattern or 'dense'}, {timing}{notes[site.name]}"
                choices[site.name] = Choice(site.name, path, reason)
        for module, module_sites in by_module.items():
            if any(site.layer is not None for site in module_sites):
                install(model, module, module_sites)
        if any(isinstance(s, ConvolutionSite) and s.layer is not None for s in all_sites):
            last = partial(Tensor.contiguous, memory_format=torch.channels_last)
            for module in model.modules():
                if isinstance(module, nn.Conv2d):  # what packed ones give it lies so already
                    module.weight.data = last(module.weight.data)
        others = fuse(model, sample, tolerance if precision else None)
    if compile:
        model.compile(mode="reduce-overhead" if "cuda" in devices(model) else None)
    dense = (Choice(name, None, reason) for name, reason in reasons.items())
    return [*choices.values(), *dense, *others]


PRECISION = Check(f"{INT8}, or None", lambda value: value in (None, INT8))


def _check(model: nn.Module, precision: str | None, tolerance: float) -> None:
    """Raise ConfigError, in one line, for what is no module and a precision that cannot be had."""
    check_module(model, "deploy")
    if "meta" in devices(model):
        raise ConfigError("the model is on meta: load its weights first")
    ranges = {"precision": PRECISION, "tolerance": number(0, 1)}
    check_values(ranges, {"precision": precision, "tolerance": plain(tolerance)})
    if precision and (why := int8.KERNELS.obstacle()):
        raise ConfigError(f"precision={INT8}: {why}")
    elsewhere = devices(model) - {"cpu"}
    if precision and elsewhere:
        raise ConfigError(f"precision={INT8} is for CPUs; the model is on {min(elsewhere)}")


def int8_layers(site: Site, sparse: bool, tolerance: float) -> tuple[dict[str, nn.Module], str]:
    """The int8 layers of a linear site by their path, and how far off they are: those whose outputs
    for the tokens seen there are near enough.

    Args:
        site: one that has seen an input.
        sparse: its weight is N:M.
        tolerance: the error's share of the outputs' norm.
    """
    ways: dict[str, Path] = {DENSE_INT8: DenseInt8Linear.of} if onednn.available_int8() else {}
    return _near(site, ways | ({INT8: Int8Linear.of} if sparse else {}), tolerance)


def _near(
    site: Site, ways: Mapping[str, Path], tolerance: float
) -> tuple[dict[str, nn.Module], str]:
    assert site.tokens is not None
    bias = None if site.bias is None else site.bias.float()
    near, notes = dict[str, nn.Module](), []
    for name, make in ways.items():
        try:
            layer = make(site.weight, site.bias)
            exact = site.product(site.tokens.float(), site.weight.float(), bias)
            near_enough, how = measurement.nearness(layer(site.tokens).float(), exact, tolerance)
        except (*measurement.ERRORS, MemoryError) as error:
            notes.append(f"{name}: {first_line(error)}")
            continue
        if near_enough:
            near[name] = layer
        notes.append(f"{name} {how}" if near_enough else f"{name}: {how}")
    return near, "; ".join(notes)


def _in_bf16(site: Site) -> dict[str, Path]:
    """The packed layers of bfloat16 for the weight of a linear site."""
    if site.weight.device.type != "cpu" or bf16.KERNELS.obstacle():
        return {}
    ways: dict[str, Path] = {BF16: Bf16Linear.of}
    if _has_blocks(site):
        ways[BF16_BLOCKS] = BlockLinear.of
    if min(tokens for tokens, _ in site.shapes) <= blocks.PANEL and not blocks.bitmaps_obstacle():
        ways[BF16_BITMAP] = BitmapLinear.of
    return ways


def _below(site: Site, sparse: bool) -> dict[str, Path]:
    """What int8 allows for beside its own layers: those of blocks, and of a float32 weight bfloat16."""
    low = site.dtype == torch.float32
    ways: dict[str, Path] = {}
    if low and torch.bfloat16 in onednn.dtypes():
        ways[DENSE_BF16] = Bf16OneDNNLinear
    if sparse:
        ways |= {INT8_BLOCKS: Int8BlockLinear.of} if _has_blocks(site) else {}
        ways |= _in_bf16(site) if low else {}
    return ways


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


def _of_convolution(site: ConvolutionSite) -> dict[str, Path]:
    """As :func:`paths`, for a convolution."""

    def of(kind: Any) -> Path:
        return lambda weight, bias: kind.of(weight, site.window, bias)

    if site.weight.device.type != "cpu":
        raise ValueError("torch has no sparse convolution")
    short = str(site.dtype).removeprefix("torch.")
    if site.dtype not in products.DTYPES:
        raise ValueError(f"{short}: packed convolutions are float32 or bfloat16")
    if why := products.KERNELS.obstacle():
        raise ValueError(why)
    if site.dtype == torch.float32:
        return {"packed": of(PackedConvolution)}
    if why := bf16.KERNELS.obstacle():
        raise ValueError(f"{short}: {why}")
    ways = {BF16: of(Bf16Convolution)}
    if site.window.positions == 1 and site.window.padding == (0, 0) and _has_blocks(site):
        ways[BF16_BLOCKS] = of(BlockConvolution)
    return ways


def _dense(site: Site) -> dict[str, Path]:
    """As :func:`paths`, for what stays dense."""
    if isinstance(site, ConvolutionSite) or site.weight.device.type != "cpu":
        return {}
    worth = site.weight.numel() * max(tokens for tokens, _ in site.shapes) >= on_cpu.SMALLEST
    if site.dtype not in onednn.dtypes() or not worth:
        return {}
    return {ONEDNN: lambda _, bias: OneDNNLinear(site.weight, bias)}


def _try(site: Site, graph: bool, algorithms: dict[Any, str]) -> tuple[str, Pattern | None]:
    """What speaks against packing a weight, and its pattern; its right candidates at the site.
    ``algorithms`` are those of weights alike, which are looked for once."""
    if site.dtype is None:
        return "the sample does not call it as a layer", None
    if site.weight.dtype != site.dtype:
        return f"its weight is {site.weight.dtype}, its input {site.dtype}", None
    ways, pattern = _dense(site), pattern_of(site.rows)
    wrong = [] if pattern else ["its weight is not N:M"]
    try:
        if isinstance(site, ConvolutionSite):
            ways |= _of_convolution(site) if pattern else {}
        elif pattern:
            ways |= paths(site.weight.device, site.dtype, pattern)
            if site.dtype == torch.bfloat16:
                ways |= _in_bf16(site)
    except ValueError as error:
        wrong.append(str(error))
    for name, make in ways.items():
        try:
            layer = make(site.weight.contiguous(), site.bias)
            if isinstance(layer, SemiStructuredLinear):
                key = *site.timing_key, site.bias is None, name
                if key not in algorithms:
                    (common, _), *_ = site.shapes.most_common(1)
                    layer.choose(_input(site, common), site.weight, graph)
                layer.path = algorithms.setdefault(key, layer.path)
            problem = next(filter(None, (_fault(site, layer, shape) for shape in site.shapes)), "")
        except (*measurement.ERRORS, MemoryError) as error:
            problem = first_line(error)
        if problem:
            wrong.append(f"{name}: {problem}")
        else:
            site.candidates[name] = layer
    return "; ".join(wrong), pattern


def _fault(site: Site, layer: nn.Module, shape: tuple[int, ...]) -> str:
    """What is wrong with a layer, empty if nothing is."""
    x = _input(site, shape)
    bias = None if site.bias is None else site.bias.float()
    return measurement.fault(partial(layer, x), site.product(x.float(), site.weight.float(), bias))


def _fastest(group: Sequence[Site], graph: bool) -> tuple[str | None, str]:
    """The path that does all that the sample brought in the least time, None for dense, and the
    times of the commonest call."""
    site = group[0]
    total, timing = times(group, graph)
    best = min(site.candidates, key=lambda name: total[name])
    # packed has to beat all that is dense, a dense candidate what torch calls, by more than noise
    candidate = best in DENSE
    rivals = [name for name in total if name not in site.candidates]
    rivals += [] if candidate else [name for name in total if name in DENSE]
    ratio = min(total[name] for name in rivals) / total[best]
    return (best if ratio > (1 / FASTER if candidate else 1) else None), f"{timing} ({ratio:.2f}x)"


def times(group: Sequence[Site], graph: bool = False) -> tuple[dict[str, float], str]:
    """The milliseconds that each way takes for all calls of the sample, and in words those of the
    commonest call. Weights alike take turns, since in the model, too, others come in between and a
    weight may have left the caches.
    """
    site, total, timing = group[0], defaultdict[str, float](float), ""
    (common, _), *_ = site.shapes.most_common(1)
    for shape, count in site.shapes.items():
        ways = [s.ways(_input(s, shape)) for s in group]
        durations = milliseconds(
            {name: [each[name] for each in ways] for name in ways[0]}, site.weight.device, graph
        )
        for name, ms in durations.items():
            total[name] += ms * count
        if shape == common:
            calls = "" if len(site.shapes) == 1 else f", one of {site.shapes.total()} calls"
            listed = ", ".join(f"{name} {ms:.3g} ms" for name, ms in durations.items())
            timing = f"{site.about(common)}{calls}: {listed}"
    return total, timing


def _input(site: Site, shape: tuple[int, ...]) -> Tensor:
    # drawn where it is needed: on a CPU the inputs of a large network take minutes
    device = site.weight.device
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(site.weight.dtype)


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
