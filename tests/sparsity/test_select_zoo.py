"""Models of three libraries: all is sparse or listed, and groups run along what the model's own forward pass sums over."""

from __future__ import annotations

from collections.abc import Callable
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

pytestmark = pytest.mark.slow

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
    """Notes along which of its dimensions each parameter is summed over, by the strides of the views that reach a product."""

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
            (own,) = (d for d, s in enumerate(parameter.stride()) if s == tensor.stride(dim) and parameter.shape[d] > 1)
            self.summed.setdefault(name, set()).add(own)


# --- the models, small and random -----------------------------------------------------------------------------------------------

TOKENS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48}
LLAMA = {**TOKENS, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "experts_implementation": "eager"}


def text() -> dict[str, Tensor]:
    return {"input_ids": torch.arange(12).reshape(2, 6)}


def both() -> dict[str, Tensor]:
    return {**text(), "decoder_input_ids": text()["input_ids"]}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": text()["input_ids"]}


def pixels(name: str, size: int = 32) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(2, 3, size, size)}


def hugging_face(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        chosen = getattr(transformers, config)(**settings)
        if implementation := settings.get("experts_implementation"):
            chosen._experts_implementation = implementation
        return getattr(transformers, kind)(chosen)

    return build


def whisper() -> nn.Module:
    sides = ("encoder", "decoder")
    sizes = {f"{s}_{what}": n for s in sides for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        d_model=32, vocab_size=48, num_mel_bins=8, max_source_positions=16, max_target_positions=16, **sizes, **marks
    )
    return transformers.WhisperForConditionalGeneration(config)


def vision(**options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=12, **options)


def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(img_size=32, patch_size=8, embed_dim=32, num_blocks=2, num_classes=12)


def convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=12)


def swin() -> nn.Module:
    kind = torchvision.models.SwinTransformer
    return kind([4, 4], 16, [1, 1], [2, 4], [4, 4], num_classes=12)


# name: (model, its inputs, share of the parameters that is sparse at 2:4, what exclude="auto" leaves dense besides)
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], float, list[str]]] = {
    "bert": (hugging_face("BertForSequenceClassification", "BertConfig", **TOKENS), text, 0.482, ["classifier.weight"]),
    "gpt2": (
        hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=48, n_positions=16,
                     bos_token_id=1, eos_token_id=2),
        text, 0.893, [],
    ),
    "llama": (hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA), text, 0.922, ["lm_head.weight"]),
    "mixtral": (
        hugging_face("MixtralForCausalLM", "MixtralConfig", **EXPERTS, num_local_experts=4), text, 0.967, ["lm_head.weight"]
    ),
    "mixtral grouped": (
        hugging_face("MixtralForCausalLM", "MixtralConfig", **{**EXPERTS, "experts_implementation": "grouped_mm"},
                     num_local_experts=4),
        text, 0.967, ["lm_head.weight"],
    ),
    "qwen3_moe": (
        hugging_face("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS, num_experts=4, moe_intermediate_size=16),
        text, 0.910, ["lm_head.weight"],
    ),
    "gpt_oss": (
        hugging_face("GptOssForCausalLM", "GptOssConfig", **EXPERTS, num_local_experts=4), text, 0.943, ["lm_head.weight"]
    ),
    "llama4": (
        hugging_face("Llama4ForCausalLM", "Llama4TextConfig", **LLAMA, intermediate_size_mlp=64, num_local_experts=4),
        text, 0.976, ["lm_head.weight"],
    ),
    "t5": (
        hugging_face("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                     vocab_size=48),
        both, 0.950, [],
    ),
    "whisper": (whisper, speech, 0.873, ["model.encoder.conv1.weight"]),
    "vit": (
        hugging_face("ViTForImageClassification", "ViTConfig", **{k: v for k, v in TOKENS.items() if k != "vocab_size"},
                     image_size=32, patch_size=8),
        pixels("pixel_values"), 0.686, ["vit.embeddings.patch_embeddings.projection.weight", "classifier.weight"],
    ),
    "timm vit": (vision, pixels("x"), 0.765, ["patch_embed.proj.weight", "head.weight"]),
    "timm convnext": (convnext, pixels("x"), 0.798, ["stem.0.weight", "head.fc.weight"]),
    "timm mixer": (mixer, pixels("x"), 0.721, ["stem.proj.weight", "head.weight"]),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=12), pixels("x"), 0.998, ["conv1.weight", "fc.weight"]),
    "mobilenet_v2": (
        lambda: torchvision.models.mobilenet_v2(num_classes=12, width_mult=0.25), pixels("x"), 0.892,
        ["features.0.0.weight", "classifier.1.weight"],
    ),
    "swin": (swin, pixels("x"), 0.902, ["features.0.0.weight", "head.weight"]),
    "torchvision vit": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=12), pixels("x"), 0.690,
        ["conv_proj.weight", "heads.head.weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_a_model_of_a_library(name: str) -> None:
    build, inputs, share, ends = ZOO[name]
    torch.manual_seed(0)
    model = build().eval()
    sparse, dense = select(model, Pattern(2, 4))
    order = [n for n, p in model.named_parameters() if p.dim() >= 2]
    listed = {d.name for d in dense}
    assert [c.name for c in sparse] == [n for n in order if n not in listed]  # nothing is left out
    assert all(d.reason for d in dense)
    total = sum(p.numel() for p in model.parameters())
    assert sum(c.tensor.numel() for c in sparse) / total == pytest.approx(share, abs=0.001)
    assert [d.name for d in select(model, Pattern(2, 4), exclude="auto")[1] if "exclude=auto" in d.reason] == ends

    with Spy(model) as spy:  # gradients are on, so that attention takes no fused path
        model(**inputs())
    assert {c.name: spy.summed.get(c.name) for c in sparse} == {c.name: {c.dim} for c in sparse}
    assert all(c.outputs != c.dim and c.tensor.dim() > max(c.outputs, c.dim) for c in sparse)
