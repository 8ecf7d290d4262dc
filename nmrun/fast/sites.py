"""Where a model multiplies with a weight that a packed layer could hold, and with which inputs. How
the packed layer takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.fast.attention import PackedAttention
from nmrun.fast.cpu.convolution import window_of
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.measurement import first_input, watched
from nmrun.products.attention import slow_path
from nmrun.products.simulation import compute_dtype
from nmrun.sparsity.layers import forward_class, is_embedding, is_touched

QUERY, KEY_VALUE, OUT = "in_proj_weight[queries]", "in_proj_weight[keys, values]", "out_proj.weight"
MOST_TOKENS = 128  # tokens that are kept, evenly far apart


@dataclass
class Site:
    """One weight as a linear layer.

    Attributes:
        name: the weight's name in the model.
        weight, bias: (outputs, inputs), and (outputs,) or None: views of the model's own.
        shapes: how many inputs had each shape; a linear layer's shape is (tokens, inputs).
        dtype: the dtype of its product.
        tokens: of a linear layer up to MOST_TOKENS tokens of its first input; None before that.
        candidates: layers that compute the same, by the name of their product.
        layer: the candidate that will replace it; None to leave it dense.
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    dtype: torch.dtype | None = None
    tokens: Tensor | None = None
    candidates: dict[str, nn.Module] = field(default_factory=dict)
    layer: nn.Module | None = None

    @property
    def rows(self) -> Tensor:
        """The weight with its groups along the rows of a matrix."""
        return self.weight

    @property
    def timing_key(self) -> tuple[Any, ...]:
        """What the times of a weight depend on, beside its pattern."""
        return self.weight.shape, self.weight.device, self.dtype, tuple(self.shapes.items())

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What is computed there with a dense weight."""
        return F.linear(x, weight, bias)

    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        """What computes it for an input: the dense ways first, then the candidates."""
        dense = partial(self.product, x, self.weight, self.bias)
        return {"dense": dense} | {name: partial(c, x) for name, c in self.candidates.items()}

    def see(self, x: Any) -> None:
        """Note an input."""
        if isinstance(x, Tensor) and x.numel():
            self.shapes[x.numel() // x.shape[-1], x.shape[-1]] += 1
            self.dtype = compute_dtype(x)
            if self.tokens is None:
                flat = x.detach().reshape(-1, x.shape[-1])
                self.tokens = flat[:: -(-len(flat) // MOST_TOKENS)].clone().to(self.dtype)

    def about(self, shape: tuple[int, ...]) -> str:
        """An input of this shape in words."""
        return f"{shape[0]} tokens"


@dataclass
class ConvolutionSite(Site):
    """The weight of a convolution, (out channels, channels, rows, columns).

    Attributes:
        window: how its kernel moves.
    """

    window: Window = field(kw_only=True)

    @property
    def rows(self) -> Tensor:
        return self.weight.permute(0, 2, 3, 1).flatten(0, 2)

    @property
    def timing_key(self) -> tuple[Any, ...]:
        return *super().timing_key, self.window

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = self.window
        return F.conv2d(x, weight, bias, w.stride, w.padding, w.dilation)

    def ways(self, x: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Packed layers, too, give their neighbours channels last."""
        last, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, self.weight))
        return {
            "dense": partial(self.product, x, self.weight, self.bias),
            "dense, channels last": partial(self.product, last, weight, self.bias),
        } | {name: partial(candidate, last) for name, candidate in self.candidates.items()}

    def see(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.numel():
            self.shapes[tuple(x.shape) if x.dim() == 4 else (1, *x.shape)] += 1
            self.dtype = compute_dtype(x)

    def about(self, shape: tuple[int, ...]) -> str:
        return f"{shape[0]} images of {shape[2]}x{shape[3]}"


# --- which weights --------------------------------------------------------------------------------

Weights = dict[str, tuple[Tensor, Tensor | None]]


def _weight_and_bias(module: Any) -> Weights:
    return {"weight": (module.weight, module.bias)}


def _conv1d(module: Any) -> Weights:  # Hugging Face's, (in, out)
    return {"weight": (module.weight.t(), module.bias)}


def _attention(module: Any) -> Weights:
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        return {}
    width, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias
    parts = {QUERY: slice(0, width), KEY_VALUE: slice(width, None)}
    projections = {
        n: (weight[rows], None if bias is None else bias[rows]) for n, rows in parts.items()
    }
    return projections | {OUT: (module.out_proj.weight, module.out_proj.bias)}


# the weights of a layer, by the class whose `forward` it has
LAYER_WEIGHTS: dict[str, Callable[[Any], Weights]] = {
    "torch.nn.modules.conv.Conv2d": _weight_and_bias,
    "torch.nn.modules.linear.Linear": _weight_and_bias,
    "transformers.pytorch_utils.Conv1D": _conv1d,
    "torch.nn.modules.activation.MultiheadAttention": _attention,
}


def weights(module: nn.Module) -> Weights:
    """The weights of a layer, (outputs, inputs) with their bias, by name; empty for a layer that no
    packed one can stand for: of another class, with a ``forward``, hooks or a parametrization of
    its own.
    """
    if is_touched(module) or hasattr(module, "parametrizations"):
        return {}
    kind = forward_class(module)
    find = LAYER_WEIGHTS.get(f"{kind.__module__}.{kind.__qualname__}")
    return {} if find is None else find(module)


def sites(model: nn.Module) -> tuple[dict[nn.Module, list[Site]], dict[str, str]]:
    """The sites by module, and of all other weights of two dimensions or more the reason why they
    are none.
    """
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    by_module: dict[nn.Module, list[Site]] = {}
    reasons: dict[str, str] = {}
    inside: set[nn.Module] = set()  # what an attention computes itself
    for path, module in model.named_modules():
        if module in inside:
            continue
        layer_weights = weights(module)
        if isinstance(module, nn.MultiheadAttention):
            inside.add(module.out_proj)
        shared = any(uses[id(p)] > 1 for p in module.parameters() if p.dim() > 1)
        for attribute, (weight, bias) in layer_weights.items():
            name = f"{path}.{attribute}".lstrip(".")
            if shared:
                reasons[name] = "another module has the same weight"
            elif module is model:
                reasons[name] = "it is the whole model: wrap it in nn.Sequential"
            else:
                try:
                    site = _site(module, name, weight.detach(), bias)
                except ValueError as error:
                    reasons[name] = str(error)
                else:
                    by_module.setdefault(module, []).append(site)
        if not layer_weights and not is_embedding(module):
            for attribute, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() > 1:
                    reasons[f"{path}.{attribute}".lstrip(".")] = (
                        "it has hooks or a forward of its own"
                        if is_touched(module)
                        else f"no packed layer stands for this {type(module).__name__}"
                    )
    return by_module, reasons


def _site(module: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> Site:
    bias = None if bias is None else bias.detach()
    if isinstance(module, nn.Conv2d):
        return ConvolutionSite(name, weight, bias, window=window_of(module))
    return Site(name, weight, bias)


def devices(model: nn.Module) -> set[str]:
    """The kinds of device that a model is on. Packed weights are buffers, and may be all there is."""
    return {t.device.type for t in (*model.parameters(), *model.buffers())}


# --- what they are given --------------------------------------------------------------------------


def watch(model: nn.Module, by_module: Mapping[nn.Module, list[Site]], sample: Any) -> None:
    """Pass the sample and note what each site is given."""

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not isinstance(module, nn.MultiheadAttention):
            by_module[module][0].see(first_input(args, kwargs))
            return
        inputs = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key_value, out = by_module[module]
        query.see(inputs["query"])
        key_value.see(inputs["key"])
        out.see(inputs["query"])

    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in by_module]
    watched(hooks, partial(compute, model, sample))


def compute(model: nn.Module, sample: Any) -> None:
    """Pass the sample, see :func:`nmrun.deploy`, layer by layer.

    Raises:
        ConfigError: for a sample of another kind.
    """
    with slow_path():
        if isinstance(sample, Tensor):
            model(sample)
        elif isinstance(sample, Mapping):
            model(**sample)
        elif isinstance(sample, tuple):
            model(*sample)
        elif callable(sample):
            sample()
        else:
            raise ConfigError(
                f"sample is a {type(sample).__name__}: it takes a tensor, tuple, dict or function"
            )


# --- how the packed layers take their place -------------------------------------------------------


def install(model: nn.Module, module: nn.Module, parts: list[Site]) -> None:
    """Put the layers of one module's sites in its place."""
    layers = [site.layer or _copied(site) for site in parts]
    for layer, site in zip(layers, parts, strict=True):
        _answer(layer, site)
    replacement = PackedAttention(module, *layers) if len(layers) > 1 else layers[0]  # type: ignore[arg-type]
    for parent, name in list(places(model, module)):
        parent._modules[name] = replacement.eval()
        # torch's encoders read weights past the layers, unless told that they cannot
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoder):
            other.use_nested_tensor = False


def _answer(layer: nn.Module, site: Site) -> None:
    """Give a layer without ``weight`` an empty one. Networks ask for its dtype and device before they
    call the layer (T5, Mamba, Qwen2-VL)."""
    if hasattr(layer, "weight"):
        return
    stored = layer._buffers.get("values")
    like = site.weight if stored is None or not stored.is_floating_point() else stored
    device = next(layer.buffers()).device  # that of the site may be meta
    empty = torch.empty(len(site.weight), 0, dtype=like.dtype, device=device)
    layer.register_buffer("weight", empty, persistent=False)


def _copied(site: Site) -> nn.Linear:
    """A dense layer of one part of an attention."""
    outputs, inputs = site.weight.shape
    layer = nn.Linear(inputs, outputs, bias=site.bias is not None, device="meta")
    layer.weight = nn.Parameter(site.weight.clone(), requires_grad=False)
    if site.bias is not None:
        layer.bias = nn.Parameter(site.bias.clone(), requires_grad=False)
    return layer


def places(model: nn.Module, module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where a module is in a model: each parent, and its name there."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is module:
                yield parent, name
