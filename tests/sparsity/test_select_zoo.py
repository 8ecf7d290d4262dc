"""Models of three libraries: all is sparse or listed; groups run along what forward sums over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nmrun import Pattern
from nmrun.sparsity.select import select

transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

pytestmark = pytest.mark.minutes

ATEN = torch.ops.aten
# of each product, the operands with the dimension that is summed over
PRODUCTS = {
    ATEN.mm.default: ((0, 1), (1, 0)),
    ATEN.addmm.default: ((1, 1), (2, 0)),
    ATEN.bmm.default: ((0, 2), (1, 1)),
    ATEN.baddbmm.default: ((1, 2), (2, 1)),
    ATEN._grouped_mm.default: ((0, 1), (1, 1)),
}


class Spy(TorchDispatchMode):
    """Notes which dimension of each parameter is summed over, by the strides of its views."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage()._cdata: (n, p) for n, p in model.named_parameters()}
        self.summed: dict[str, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ATEN.convolution.default:
            self.note(args[1], 0 if args[6] else 1)
        for operand, dim in PRODUCTS.get(func, ()):
            self.note(args[operand], dim)
        return func(*args, **(kwargs or {}))

    def note(self, tensor: Tensor, dim: int) -> None:
        name, parameter = self.parameters.get(tensor.untyped_storage()._cdata, ("", tensor))
        if name and tensor.shape[dim] > 1:
            sizes = zip(parameter.shape, parameter.stride(), strict=True)
            steps = [stride if size > 1 else 0 for size, stride in sizes]
            axis = steps.index(tensor.stride(dim))
            self.summed.setdefault(name, set()).add(axis)


# --- the models, small and random ---------------------------------------------------------------

TOKENS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 48,
}
LLAMA = {**TOKENS, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(12).reshape(2, 6)}


def both() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": text()["input_ids"]}


def pixels(name: str, size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(2, 3, size, size)}


def hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        chosen = getattr(transformers, config)(**settings)
        if implementation := settings.get("experts_implementation"):
            chosen._experts_implementation = implementation
        return getattr(transformers, kind)(chosen)

    return build


def vision() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return VisionTransformer(**sizes, num_classes=12)


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=12)


@dataclass
class Case:
    """A model, its inputs, which share is sparse at 2:4, and what ``exclude="auto"`` adds."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    share: float
    ends: list[str]


def text_model(kind: str, config: str, share: float, ends: list[str], **settings: Any) -> Case:
    return Case(hugging_face(kind, config, **settings), text, share, ends)


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 16}
MARKS = {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 48}
VIT = {**{k: v for k, v in TOKENS.items() if k != "vocab_size"}, "image_size": 32, "patch_size": 8}
MIXTURE = {**EXPERTS, "num_local_experts": 4}
GROUPED = {**MIXTURE, "experts_implementation": "grouped_mm"}
LM, IMAGE = ["lm_head.weight"], pixels("x")
VISION = torchvision.models

ZOO = {
    "bert": text_model(
        "BertForSequenceClassification", "BertConfig", 0.482, ["classifier.weight"], **TOKENS
    ),
    "gpt2": text_model("GPT2LMHeadModel", "GPT2Config", 0.893, [], **GPT2, **MARKS),
    "llama": text_model("LlamaForCausalLM", "LlamaConfig", 0.922, LM, **LLAMA),
    "mixtral grouped": text_model("MixtralForCausalLM", "MixtralConfig", 0.967, LM, **GROUPED),
    "gpt_oss": text_model("GptOssForCausalLM", "GptOssConfig", 0.943, LM, **MIXTURE),
    "t5": Case(hugging_face("T5ForConditionalGeneration", "T5Config", **T5), both, 0.950, []),
    "vit": Case(
        hugging_face("ViTForImageClassification", "ViTConfig", **VIT),
        pixels("pixel_values"),
        0.686,
        ["vit.embeddings.patch_embeddings.projection.weight", "classifier.weight"],
    ),
    "timm vit": Case(vision, IMAGE, 0.765, ["patch_embed.proj.weight", "head.weight"]),
    "timm convnext": Case(convnext, IMAGE, 0.798, ["stem.0.weight", "head.fc.weight"]),
    "resnet18": Case(VISION.resnet18, IMAGE, 0.998, ["conv1.weight", "fc.weight"]),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_a_library(name):
    case = ZOO[name]
    torch.manual_seed(0)
    model = case.build().eval()
    sparse, dense = select(model, Pattern(2, 4))
    order = [n for n, p in model.named_parameters() if p.dim() >= 2]
    listed = {d.name for d in dense}
    assert [c.name for c in sparse] == [n for n in order if n not in listed]  # nothing is left out
    assert all(d.reason for d in dense)
    total = sum(p.numel() for p in model.parameters())
    assert sum(c.parameter.numel() for c in sparse) / total == pytest.approx(case.share, abs=0.001)
    auto = select(model, Pattern(2, 4), exclude="auto")[1]
    assert [d.name for d in auto if "exclude=auto" in d.reason] == case.ends

    with Spy(model) as spy:  # gradients are on, so that attention takes no fused path
        model(**case.inputs())
    assert {c.name: spy.summed.get(c.name) for c in sparse} == {c.name: {c.dim} for c in sparse}
    assert all(c.outputs != c.dim and c.parameter.dim() > max(c.outputs, c.dim) for c in sparse)
