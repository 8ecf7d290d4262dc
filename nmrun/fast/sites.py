"""Where a model multiplies with a weight that a packed layer could hold, and with which inputs. How
the packed layer takes its place, that of ``nn.MultiheadAttention`` with a layer for each of its weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.fast.cpu.convolution import window_of
from nmrun.fast.cpu.kernels.convolution import Window
from nmrun.fast.measurement import first_input, watched
from nmrun.patterns import Pattern
from nmrun.products.attention import slow_path
from nmrun.products.simulation import compute_dtype
from nmrun.sparsity.layers import forward_class, is_embedding, is_touched

QUERY, KEY_VALUE, OUT = "in_proj_weight[queries]", "in_proj_weight[keys, values]", "out_proj.weight"
MOST_TOKENS = 128  # tokens that are kept, evenly far apart


@dataclass
class Place:
    """A layer whose place another that computes the same may take.

    Attributes:
        name: of the layer, or its weight, in the model.
        module: the layer.
        shapes: how many inputs had each shape.
        given: the first inputs of each shape; places may share them.
        candidates: layers that compute the same, by the name of their product.
        notes: what was found of them, beside the times.
        layer: the candidate that will replace it; None to leave it as it is.
        roundings: of its layers, as in :func:`nmrun.fast.measurement.fault`.
    """

    name: str
    module: Any = None
    shapes: Counter[Any] = field(default_factory=Counter, kw_only=True)
    given: dict[Any, tuple[Tensor, ...]] = field(default_factory=dict, kw_only=True)
    candidates: dict[str, nn.Module] = field(default_factory=dict, kw_only=True)
    notes: list[str] = field(default_factory=list, kw_only=True)
    layer: nn.Module | None = field(default=None, kw_only=True)
    roundings: int = field(default=1, kw_only=True)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device("cpu")

    @property
    def timing_key(self) -> tuple[Any, ...]:
        """What the times depend on."""
        return repr(self.module), *self.candidates, *self.shapes.items()

    def inputs(self, shape: Any) -> tuple[Tensor, ...]:
        """Inputs of a shape, to be timed and compared with."""
        return self.given[shape]

    def exact(self, *inputs: Tensor) -> Tensor:
        """What is computed there, in float32."""
        result: Tensor = self.module(*(t.float() for t in inputs))
        return result

    def ways(self, *inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        """What computes it for inputs: what is there first, then the candidates."""
        arms = {"torch": self.module} | self.candidates
        return {name: partial(arm, *inputs) for name, arm in arms.items()}

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call, as a hook."""
        tensors = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        shapes = tuple((t.shape, t.dtype) for t in tensors)
        self.shapes[shapes] += 1
        if shapes not in self.given:
            self.given[shapes] = tuple(t.detach().clone() for t in tensors)

    def about(self, shape: Any) -> str:
        """An input of this shape in words."""
        return " x ".join(map(str, shape[0][0]))


@dataclass
class Site(Place):
    """One weight as a linear layer.

    Attributes:
        weight, bias: (outputs, inputs), and (outputs,) or None: views of the model's own.
        shapes: of the inputs, (tokens, inputs).
        given: up to MOST_TOKENS tokens of the first input of a linear layer.
        pattern: of the weight, None for a dense one.
        dtype: the dtype of its product, None where it is not called.
    """

    module: None = field(default=None, init=False)
    weight: Tensor
    bias: Tensor | None
    pattern: Pattern | None = None
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def rows(self) -> Tensor:
        """The weight with its groups along the rows of a matrix."""
        return self.weight

    @property
    def timing_key(self) -> tuple[Any, ...]:
        about = self.weight.shape, self.device, self.dtype, self.pattern
        return *about, *self.candidates, *self.shapes.items()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What is computed there with a dense weight."""
        return F.linear(x, weight, bias)

    def inputs(self, shape: Any) -> tuple[Tensor, ...]:
        # drawn where it is needed: on a CPU the inputs of a large network take minutes
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(shape, generator=generator, device=self.device)
        return (x.to(self.weight.dtype),)

    def exact(self, *inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return self.product(inputs[0].float(), self.weight.float(), bias)

    def ways(self, *inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        (x,) = inputs
        dense = partial(self.product, x, self.weight, self.bias)
        return {"dense": dense} | {n: partial(c, x) for n, c in self.candidates.items()}

    def note(self, x: Any) -> None:
        """Note an input."""
        if isinstance(x, Tensor) and x.numel():
            shape = x.numel() // x.shape[-1], x.shape[-1]
            self.shapes[shape] += 1
            self.dtype = compute_dtype(x)
            if not self.given:
                flat = x.detach().reshape(shape)
                tokens = flat[:: -(-len(flat) // MOST_TOKENS)].clone().to(self.dtype)
                self.given[shape] = (tokens,)

    def about(self, shape: Any) -> str:
        return f"{self.pattern or 'dense'}, {shape[0]} tokens"


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
        return F.conv2d(x, weight, bias, *self.window.moves)

    def ways(self, *inputs: Tensor) -> dict[str, Callable[[], Tensor]]:
        """Packed layers, too, give their neighbours channels last."""
        (x,) = inputs
        last, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, self.weight))
        return {
            "dense": partial(self.product, x, self.weight, self.bias),
            "dense, channels last": partial(self.product, last, weight, self.bias),
        } | {name: partial(candidate, last) for name, candidate in self.candidates.items()}

    def note(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.numel():
            self.shapes[tuple(x.shape) if x.dim() == 4 else (1, *x.shape)] += 1
            self.dtype = compute_dtype(x)

    def about(self, shape: Any) -> str:
        return f"{self.pattern or 'dense'}, {shape[0]} images of {shape[2]}x{shape[3]}"


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
            parameters = dict(module._parameters)
            if isinstance(module, nn.MultiheadAttention):
                parameters[OUT] = module.out_proj.weight
            for attribute, parameter in parameters.items():
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
            by_module[module][0].note(first_input(args, kwargs))
            return
        inputs = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key_value, out = by_module[module]
        query.note(inputs["query"])
        key, value = inputs["key"], inputs["value"]
        # one layer is given both, and is judged by both
        key_value.note(key if value is key else torch.cat((key, value)))
        if out.given:  # it is given as many tokens as the queries are
            out.note(inputs["query"])
        else:
            inside = PackedAttention(module, _copied(query), _copied(key_value), nn.Identity())
            out.note(inside(*args, **kwargs)[0])

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
    replace(model, module, replacement)
    # torch's encoders read weights past the layers, unless told that they cannot
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoderLayer) and replacement in other.children():
            other.activation_relu_or_gelu = 0
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


def replace(model: nn.Module, module: nn.Module, other: nn.Module) -> None:
    """Put another module wherever this one is in a model."""
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            if child is module:
                parent._modules[name] = other.eval()


class MaskedAttention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention`, where another layer may take its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """All are (batch, heads, tokens, width); the mask is added to the scores."""
        return F.scaled_dot_product_attention(q, k, v, mask)


class PackedAttention(nn.Module):
    """``nn.MultiheadAttention`` with layers in the place of its weights: ``query`` with (embed_dim,)
    outputs, ``key_value`` with (2 embed_dim,), and ``out``. The keys and values of ``attention`` are as
    wide as its queries."""

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        query: nn.Module,
        key_value: nn.Module,
        out: nn.Module,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.batch_first = attention.batch_first
        # torch's encoder layers look at these before they read weights past the layers
        self.in_proj_bias, self._qkv_same_embed_dim = None, False
        self.query, self.key_value, self.out_proj = query, key_value, out
        self.attention = MaskedAttention()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As :meth:`torch.nn.MultiheadAttention.forward`, without dropout."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        if key.shape[:-1] != value.shape[:-1]:  # some of torch's kernels would take it
            raise RuntimeError(f"keys of {list(key.shape)} with values of {list(value.shape)}")
        single, same = query.dim() == 2, key is value
        query, key, value = (self._batched(t) for t in (query, key, value))
        if single and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        k, v = self.key_value(key).chunk(2, -1)
        if not same:
            v = self.key_value(value).chunk(2, -1)[1]
        q, k, v = (
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (self.query(query), k, v)
        )
        mask = self._mask(attn_mask, key_padding_mask, q, k.shape[2])
        weights = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3)
            weights = torch.softmax(scores if mask is None else scores + mask, -1)
            z = weights @ v
        else:
            z = self.attention(q, k, v, mask)
        z = self.out_proj(z.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if single:
            return z[0], None if weights is None else weights[0]
        return z if self.batch_first else z.transpose(0, 1), weights

    def _batched(self, t: Tensor) -> Tensor:
        return t[None] if t.dim() == 2 else t if self.batch_first else t.transpose(0, 1)

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        """Both masks, to be added to the scores (batch, heads, queries, keys)."""
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, q)
            mask = mask.view(-1, self.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
        if padding is not None:
            padding = _added(padding, q).view(len(padding), 1, 1, keys)
            mask = padding if mask is None else mask + padding
        return mask


def _added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
