"""Experts, parameters of unknown layers, adapters and kinds of tensors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nmrun import Pattern
from nmrun.errors import ConfigError
from nmrun.sparsity import check_nm, hard_threshold
from nmrun.sparsity.layers import Candidate
from nmrun.sparsity.select import candidates, select

UNKNOWN = "not a weight of a known layer (dims={...} names its input dimension)"
UNTOLD = "which dimension is summed over cannot be told; say so by dims={...}"
ADAPTER = "an adapter (LoRA); include names it if it is meant"


class Holder(nn.Module):
    """A module with these parameters, or with random ones of these shapes."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__()
        for name, value in parameters.items():
            tensor = torch.randn(value) if isinstance(value, tuple) else value
            self.register_parameter(name, nn.Parameter(tensor, tensor.is_floating_point()))


class SomeExperts(Holder):
    pass


def sparse(model: nn.Module, pattern: str = "2:4", **options: Any) -> dict[str, tuple[int, int]]:
    return {c.name: (c.dim, c.outputs) for c in select(model, Pattern.parse(pattern), **options)[0]}


def reasons(model: nn.Module, pattern: str = "2:4", **options: Any) -> dict[str, str]:
    return {d.name: d.reason for d in select(model, Pattern.parse(pattern), **options)[1]}


# --- experts ------------------------------------------------------------------------------------


def by_hand(experts: nn.Module, x: Tensor, chosen: Tensor, shares: Tensor, gate: Any) -> Tensor:
    """Each token through its experts, by einsum with the dimensions that ``candidates`` gives."""
    by_attribute = {c.attribute: c for c in candidates(experts)}

    def product(name: str, expert: int, x: Tensor) -> Tensor:
        c: Candidate = by_attribute[name]
        letters = {0: "e", c.dim: "i", c.outputs: "o"}
        weight = torch.einsum(f"{letters[0]}{letters[1]}{letters[2]}->eoi", c.parameter)[expert]
        bias = getattr(experts, f"{name}_bias", None)
        return torch.einsum("oi,i->o", weight, x) + (0.0 if bias is None else bias[expert])

    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            inner = gate(product("gate_up_proj", expert, x[token]))
            out[token] += share * product("down_proj", expert, inner)
    return out


@pytest.mark.parametrize(
    ("name", "intermediate"),
    [("mixtral", 12), ("mixtral", 8), ("qwen3_moe", 16), ("gpt_oss", 12), ("gpt_oss", 8)],
)
def test_experts_sum_over_the_dimension_that_is_found(name, intermediate):
    """Also where the sizes are equal, so that the wrong dimension would fit as well."""
    transformers = pytest.importorskip("transformers")
    family = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss"}[name]
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size"), intermediate)
    counts = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2}
    settings = getattr(transformers, f"{family}Config")(hidden_size=8, **sizes, **counts)
    settings._experts_implementation = "eager"
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    experts = getattr(module, f"{family}Experts")(settings)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    x, shares = torch.randn(4, 8), torch.rand(4, 2)
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])

    def gate(both):
        if name == "gpt_oss":
            return experts._apply_gate(both)
        return experts.act_fn(both[: len(both) // 2]) * both[len(both) // 2 :]

    with torch.no_grad():
        expected = by_hand(experts, x, chosen, shares, gate)
        torch.testing.assert_close(experts(x, chosen, shares), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(8, 12), (8, 8), (8, 4), (8, 16), (16, 4)])
def test_a_gated_pair_is_told_by_its_sizes(hidden, inner, transposed):
    stacks = {"wi": (3, 2 * inner, hidden), "wo": (3, hidden, inner)}
    if transposed:
        stacks = {name: (e, b, a) for name, (e, a, b) in stacks.items()}
    expected = dict.fromkeys(stacks, (1, 2) if transposed else (2, 1))
    assert sparse(Holder(**stacks)) == expected
    assert sparse(Holder(**dict(reversed(stacks.items())))) == expected


def test_experts_that_cannot_be_told_stay_dense():
    pair = SomeExperts(up=(3, 12, 8), down=(3, 8, 12))
    assert sparse(pair) == {}
    assert reasons(pair) == {"up": UNTOLD, "down": UNTOLD}
    assert sparse(pair, dims={"up|down": 2}) == {"up": (2, 1), "down": (2, 1)}
    assert sparse(pair, dims={"up": 1, "down": 2}) == {"up": (1, 2), "down": (2, 1)}
    tokens = Holder(cls_token=(1, 1, 8), positions=(1, 5, 8))
    assert reasons(tokens) == {"cls_token": UNKNOWN, "positions": UNKNOWN}


# --- what is said by dims -----------------------------------------------------------------------


def test_dims_make_any_parameter_a_candidate():
    own = Holder(a=(8, 6), b=(6, 8), c=(4, 8, 3, 3), d=(2, 3, 8), scale=(8,))
    model = nn.ModuleDict({"own": own, "fc": nn.Linear(8, 8)})
    assert sparse(model) == {"fc.weight": (1, 0)}
    assert reasons(model) == dict.fromkeys(["own.a", "own.b", "own.c", "own.d"], UNKNOWN)
    dims = {r"own\.a": 0, r"own\.[bc]": 1, r"own\.d": 2, r".*\.b": 0}
    axes = {"own.a": (0, 1), "own.b": (1, 0), "own.c": (1, 0), "own.d": (2, 1), "fc.weight": (1, 0)}
    assert sparse(model, dims=dims) == axes  # the first that matches counts
    assert {c.name: (c.dim, c.outputs) for c in candidates(model, dims)} == axes
    assert sparse(model, dims={"fc.weight": 0})["fc.weight"] == (0, 1)
    del axes["fc.weight"]
    assert sparse(model, dims=dims, include="own") == axes
    with pytest.raises(ConfigError, match=r"dims: 'own\\\\.a': 1.0 is no dimension of own.a"):
        sparse(model, dims={r"own\.a": 1.0})
    assert "6 inputs are not a multiple of 4" in reasons(model, dims={r"own\.a": 1})["own.a"]


def test_dims_cannot_name_what_is_computed():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model = nn.ModuleDict({"table": nn.Embedding(8, 8), "normed": normed})
    assert sparse(model, dims={".*": 1}) == {"table.weight": (1, 0)}


def test_check_nm_takes_dims_and_auto():
    model = nn.Sequential(nn.Linear(8, 8), Holder(a=(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[2].weight.copy_(hard_threshold(model[2].weight, "2:4"))
        model[1].a.copy_(hard_threshold(model[1].a, "2:4", 0))
    assert check_nm(model, "2:4", exclude="auto", dims={r"1\.a": 0}) == ["1.a", "2.weight"]
    with pytest.raises(ValueError, match=r"1\.a is not 2:4"):
        check_nm(model, "2:4", exclude="auto", dims={r"1\.a": 1})
    with pytest.raises(ValueError, match=r"0\.weight is not 2:4"):
        check_nm(model, "2:4", exclude=None)
    with pytest.raises(ConfigError, match="dims: 'b' matches no parameter"):
        check_nm(model, "2:4", dims={"b": 1}, exclude=None)


# --- adapters -----------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer with adapters, laid out as PEFT does."""

    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A", "hada_w1_a")

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, 8, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({"default": torch.zeros(4, 8)})
        self.hada_w1_a = nn.ParameterDict({"default": torch.zeros(8, 4)})


def test_adapters_are_sparse_only_if_named():
    model = nn.ModuleDict({"q": Adapted(), "ia3": Holder(ia3_l=(8, 1))})
    model.add_module("plain", Holder(lora_A=(4, 8)))  # without PEFT
    assert sparse(model) == {"q.base_layer.weight": (1, 0)}
    others = [f"q.{name}.default" for name in ("lora_embedding_A", "hada_w1_a")]
    others += [f"q.lora_{letter}.default.weight" for letter in "AB"]
    assert reasons(model) == dict.fromkeys([*others, "ia3.ia3_l", "plain.lora_A"], ADAPTER)
    assert sparse(model, include=r".*lora_A\..*") == {"q.lora_A.default.weight": (1, 0)}
    assert sparse(model, include="plain", dims={".*lora_A": 1}) == {"plain.lora_A": (1, 0)}


def test_a_layer_that_is_saved_in_full_is_no_adapter():
    wrapper = nn.Module()
    wrapper.adapter_layer_names = ("modules_to_save",)
    wrapper.modules_to_save = nn.ModuleDict({"default": nn.Linear(8, 8)})
    assert sparse(wrapper) == {"modules_to_save.default.weight": (1, 0)}


# --- kinds of tensors ---------------------------------------------------------------------------


def with_weight(data: Tensor) -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(data, requires_grad=False)
    return linear


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_stay_dense(dtype):
    by_name = reasons(with_weight(torch.ones(8, 8).to(dtype)))
    assert by_name == {"weight": f"quantised or of another kind ({dtype})"}


def test_weights_packed_by_bitsandbytes_stay_dense():
    linear = with_weight(torch.ones(32, 1, dtype=torch.bfloat16))
    linear.weight.quant_state = None
    assert reasons(linear) == {"weight": "quantised or of another kind (Parameter)"}


def test_a_tensor_of_another_kind_stays_dense():
    class Packed(torch.Tensor):
        pass

    linear = with_weight(torch.ones(8, 8).as_subclass(Packed))
    assert reasons(linear) == {"weight": "quantised or of another kind (Packed)"}


def test_half_precision_and_the_meta_device_are_fine():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 8, dtype=torch.bfloat16))
    assert sparse(model) == {"0.weight": (1, 0), "1.weight": (1, 0)}


def test_a_lazy_layer_stays_dense():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    assert sparse(model, dims={".*weight": 0}) == {"1.weight": (0, 1)}
    lazy = select(model, Pattern(2, 4))[1][0]
    assert (lazy.name, lazy.shape) == ("0.weight", ())
    assert lazy.reason == "not initialised yet (run the model once first)"


def test_everything_of_two_dimensions_is_listed_in_order():
    plain = nn.LayerNorm(8), nn.Linear(8, 8), nn.Conv1d(3, 8, 1)
    model = nn.Sequential(nn.Embedding(8, 8), Holder(table=(8, 8), vector=(8,)), *plain)
    chosen, dense = select(model, Pattern(2, 4))
    order = [n for n, p in model.named_parameters() if p.dim() >= 2]
    assert sorted([*(c.name for c in chosen), *(d.name for d in dense)], key=order.index) == order
    shapes = {"0.weight": (8, 8), "1.table": (8, 8), "4.weight": (8, 3, 1)}
    assert {d.name: d.shape for d in dense} == shapes


def test_frozen_biases_and_positions_are_told_what_they_are_first():
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    assert reasons(attention) == {"bias_k": "a bias", "bias_v": "a bias"}
    model = nn.ModuleDict({"table": nn.Embedding(8, 8), "fc": nn.Linear(8, 8)})
    owned = {id(p) for p in model.requires_grad_(False).parameters()}
    assert reasons(model, owned=owned) == {"table.weight": "an embedding", "fc.weight": "frozen"}
