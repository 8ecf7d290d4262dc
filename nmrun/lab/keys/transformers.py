"""The keys of Transformers: of texts, images and running text, from scratch and of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import IMAGES, RUNNING_TEXT, TEXTS
from nmrun.lab.keys.models import Model
from nmrun.ranges import FLAG, FRACTION, TEXT, one_of, whole

FEED_FORWARD = (
    "regular expressions for whole module names that may be sparse; null = all; "
    r"'h\.\d+\.mlp\..*' = feed-forward only"
)
TIED_HEAD = "the head, which is the token embedding as well, stays dense"


@dataclass(frozen=True)
class Transformer(Model):
    """A Transformer."""

    decays: ClassVar[str] = "matrices"  # nanoGPT; DeiT's code; BERT's code
    data: ClassVar[str] = TEXTS

    layers: Annotated[int, whole(1), "blocks of attention and feed-forward"] = 2
    heads: Annotated[int, whole(1), "of attention, in each layer"] = 4
    width: Annotated[
        int,
        whole(1),
        "of embeddings and residual stream; the feed-forward layers are four times as wide",
    ] = 64
    dropout: Annotated[float, FRACTION, "of embeddings, attention and both outputs of a layer"] = (
        0.0
    )


@dataclass(frozen=True)
class Activated(Transformer):
    """A Transformer with a choice of activation."""

    activation: Annotated[
        str,
        one_of("gelu", "relu2"),
        "of the feed-forward layers: gelu, or relu2 (the squared ReLU, most of whose outputs are 0)",
    ] = "gelu"


@dataclass(frozen=True)
class TextEncoder(Activated):
    """A small Transformer encoder for texts, from scratch (torch's nn.TransformerEncoder)."""

    dropout: Annotated[float, "of embeddings, attention and both parts of a layer"] = 0.1
    exclude: Annotated[Sequence[str] | None, "embeddings and head stay dense"] = ("head",)


@dataclass(frozen=True)
class GPT(Activated):
    """GPT-2's architecture."""

    data: ClassVar[str] = RUNNING_TEXT

    bias: Annotated[bool, FLAG, "of linear layers and norms; nanoGPT's are without"] = True
    include: Annotated[Sequence[str] | None, FEED_FORWARD] = None
    exclude: Annotated[Sequence[str] | None, TIED_HEAD] = ("lm_head",)


@dataclass(frozen=True)
class GPTTiny(GPT):
    """GPT-2's architecture at 0.1 million parameters: seconds on a CPU."""


@dataclass(frozen=True)
class GPT2(GPT):
    """GPT-2, 124 million parameters, from scratch."""

    layers: int = 12
    heads: int = 12
    width: int = 768


@dataclass(frozen=True)
class GPT2Medium(GPT):
    """GPT-2 medium, 355 million parameters, from scratch."""

    layers: int = 24
    heads: int = 16
    width: int = 1024


@dataclass(frozen=True)
class GPT2Large(GPT):
    """GPT-2 large, 774 million parameters, from scratch."""

    layers: int = 36
    heads: int = 20
    width: int = 1280


@dataclass(frozen=True)
class GPT2XL(GPT):
    """GPT-2 XL, 1,558 million parameters, from scratch."""

    layers: int = 48
    heads: int = 25
    width: int = 1600


@dataclass(frozen=True)
class GPTClassifier(GPT2):
    """GPT-2's architecture with a new head for classes of texts, to fine-tune a run of model=gpt2
    (init=RUN).
    """

    data: ClassVar[str] = TEXTS

    context: Annotated[
        int, whole(1), "positions: dataset.context of the run that is fine-tuned"
    ] = 1024
    embeddings: Annotated[
        int | None,
        whole(4, optional=True),
        "tokens of the run that is fine-tuned; null = as many as the data have",
    ] = None
    exclude: Annotated[Sequence[str] | None, "the new head stays dense"] = ("head",)


@dataclass(frozen=True)
class ViT(Activated):
    """Vision Transformers."""

    data: ClassVar[str] = IMAGES

    patch: Annotated[
        int | None,
        whole(1, optional=True),
        "pixels of a patch's side; null = 16, or 4 for images below 64 pixels",
    ] = None
    stochastic_depth: Annotated[
        float,
        FRACTION,
        "probability of leaving out the last layer in training; of the others linearly less",
    ] = 0.0
    layers: int = 12
    width: Annotated[
        int, "of the residual stream; the feed-forward layers are four times as wide"
    ] = 192
    heads: int = 3
    dropout: Annotated[float, "of embeddings and of both outputs of a layer"] = 0.0
    include: Annotated[
        Sequence[str] | None,
        "feed-forward layers only (regular expressions for whole module names); null = all; "
        r"queries and keys: '.*\.(query|key)'",
    ] = (r".*\.mlp\.\d",)
    exclude: Sequence[str] | None = ("conv_proj", r"heads\.head")


@dataclass(frozen=True)
class ViTTiny(ViT):
    """ViT-Tiny, 5.7 million parameters."""


@dataclass(frozen=True)
class ViTSmall(ViT):
    """ViT-Small, 22 million parameters."""

    heads: int = 6
    width: int = 384


@dataclass(frozen=True)
class ViTBase(ViT):
    """ViT-Base (Dosovitskiy et al. 2021), 87 million parameters."""

    heads: int = 12
    width: int = 768


@dataclass(frozen=True)
class DeiTTiny(ViTTiny):
    """DeiT-Tiny without distillation (Touvron et al. 2021): ViT-Tiny with stochastic depth."""

    stochastic_depth: float = 0.1


@dataclass(frozen=True)
class DeiTSmall(ViTSmall):
    """DeiT-Small without distillation (Touvron et al. 2021): ViT-Small with stochastic depth."""

    stochastic_depth: float = 0.1


@dataclass(frozen=True)
class HFCausal(Model):
    """Any causal language model of Hugging Face (Llama, Qwen, Mistral, Phi, ...) as transformers
    computes it (needs nmrun[transformers]).
    """

    decays: ClassVar[str] = "matrices"  # BERT's code, and the Trainer of transformers
    data: ClassVar[str] = RUNNING_TEXT
    trained: ClassVar[bool] = True

    pretrained: Annotated[
        str, TEXT, "a name on the hub, or a folder that save_pretrained wrote"
    ] = "gpt2"
    exclude: Annotated[Sequence[str] | None, "the head stays dense"] = ("auto",)


@dataclass(frozen=True)
class HFGPT2(HFCausal):
    """A pretrained GPT-2 from Hugging Face, for fine-tuning (pip install nmrun[transformers])."""

    dropout: Annotated[float, FRACTION, "of embeddings, attention and both outputs of a layer"] = (
        0.1
    )
    include: Annotated[Sequence[str] | None, FEED_FORWARD] = None
    exclude: Annotated[Sequence[str] | None, TIED_HEAD] = ("lm_head",)


@dataclass(frozen=True)
class HFEncoder(Model):
    """Any encoder of Hugging Face with a new head, for fine-tuning (needs nmrun[transformers])."""

    decays: ClassVar[str] = "matrices"  # BERT's code, and the Trainer of transformers
    data: ClassVar[str] = TEXTS

    pretrained: Annotated[
        str, TEXT, "a name on the hub, or a folder with config.json, weights and tokenizer"
    ] = "bert-base-uncased"
    pooling: Annotated[
        str,
        one_of("cls", "mean", "similarity"),
        "what the head sees: cls (first token, through the encoder's pooler if it has one), mean "
        "(of all tokens), similarity (cosine of a pair's two means)",
    ] = "cls"
    dropout: Annotated[
        float, FRACTION, "before the head; the encoder's own is in its config.json"
    ] = 0.1
    exclude: Annotated[
        Sequence[str] | None,
        "all linear layers of the encoder are sparse; embeddings, pooler and head stay dense",
    ] = (".*pooler.*|head",)
