"""The keys of models: networks for images, and Transformers for images, texts and running text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from nmrun.lab.keys.datasets import IMAGES, RUNNING_TEXT, TEXTS
from nmrun.lab.keys.groups import Named
from nmrun.ranges import ARGUMENTS, EXPRESSIONS, FLAG, FRACTION, TEXT, WIDTHS, Check, one_of, whole

DEPTH = Check(
    "6n + 2, such as 8, 14, 20, 32, 44, 56 or 110",
    lambda value: type(value) is int and value >= 8 and value % 6 == 2,
)


@dataclass(frozen=True)
class Model(Named):
    """A model: the modules that may be sparse.

    ``decays`` says which parameters its literature lets decay, for ``optimizer.decay=null``;
    ``data`` what it takes; ``trained`` whether it can come trained to the last layer. ``builder``
    is the dotted path of what builds it.
    """

    decays: ClassVar[str] = "all"
    data: ClassVar[str] = IMAGES
    trained: ClassVar[bool] = False
    builder: ClassVar[str] = ""

    include: Annotated[
        Sequence[str] | None,
        EXPRESSIONS,
        "regular expressions for whole module names that may be sparse; null = all",
    ] = None
    exclude: Annotated[
        Sequence[str] | None,
        EXPRESSIONS,
        "layers that stay dense, for all recipes: regular expressions for whole module names, or "
        "auto (the first layer and the heads); null = none",
    ] = ("auto",)


@dataclass(frozen=True, kw_only=True)
class OwnModel(Model):
    """A model of the user's own: ``target`` builds it, and knows the keys in ``options``."""

    target: str
    options: dict[str, Any]

    def values(self) -> dict[str, Any]:
        common = {"_target_": self.target, "include": self.include, "exclude": self.exclude}
        return {**common, **self.options}


@dataclass(frozen=True)
class SmallConv(Model):
    """3x3 convolutions with ReLU, max-pooled twice, and a linear head; no normalisation."""

    builder: ClassVar[str] = "nmrun.lab.models.images.SmallConvNetwork"

    channels: Annotated[
        Sequence[int], WIDTHS, "channels of the stem and the inner convolutions"
    ] = (
        32,
        64,
        64,
    )


@dataclass(frozen=True)
class SmallConvBN(SmallConv):
    """3x3 convolutions with ReLU, max-pooled twice, and a linear head; batch normalisation before
    each ReLU.
    """

    builder: ClassVar[str] = "nmrun.lab.models.images.small_conv_bn"


@dataclass(frozen=True)
class MLP(Model):
    """A perceptron over the raw pixels, some of which are always zero."""

    builder: ClassVar[str] = "nmrun.lab.models.images.MLPNetwork"

    hidden: Annotated[Sequence[int], WIDTHS, "widths of the hidden layers"] = (64, 64)


@dataclass(frozen=True)
class ResNet20(Model):
    """ResNet-20 for CIFAR, 0.27 million parameters, shortcuts without parameters (He et al. 2016,
    4.2).
    """

    builder: ClassVar[str] = "nmrun.lab.models.images.CifarResNet"

    depth: Annotated[int, DEPTH, "layers"] = 20


@dataclass(frozen=True)
class ResNet32(ResNet20):
    """ResNet-32 for CIFAR, 0.46 million parameters, shortcuts without parameters (He et al. 2016,
    4.2).
    """

    depth: int = 32


@dataclass(frozen=True)
class Pretrained(Model):
    """A network for images that its library has trained on ImageNet."""

    pretrained: Annotated[
        bool,
        FLAG,
        "begin with its library's weights of ImageNet, which are downloaded; the head is new",
    ] = False


@dataclass(frozen=True)
class Torchvision(Pretrained):
    """A network of torchvision."""

    builder: ClassVar[str] = "nmrun.lab.models.images.of_torchvision"

    form: Annotated[
        str,
        one_of("auto", "cifar", "imagenet"),
        "auto, imagenet, or cifar: a 3x3 stem and no first pooling (auto: for up to 64 pixels)",
    ] = "auto"


@dataclass(frozen=True)
class ResNet18(Torchvision):
    """torchvision's ResNet-18 (He et al. 2016)."""


@dataclass(frozen=True)
class ResNet34(Torchvision):
    """torchvision's ResNet-34 (He et al. 2016)."""


@dataclass(frozen=True)
class ResNet50(Torchvision):
    """torchvision's ResNet-50 (He et al. 2016)."""


@dataclass(frozen=True)
class DenseNet121(Torchvision):
    """torchvision's DenseNet-121 (Huang et al. 2017)."""


@dataclass(frozen=True)
class VGG16(Torchvision):
    """torchvision's VGG-16 with batch normalisation (Simonyan and Zisserman 2015)."""

    form: Annotated[
        str, "auto, imagenet, or cifar: one linear layer at the end (auto: for up to 64 pixels)"
    ] = "auto"


@dataclass(frozen=True)
class MobileNetV2(Torchvision):
    """torchvision's MobileNetV2 (Sandler et al. 2018). Depthwise convolutions, which have one input
    each, stay dense.
    """

    form: Annotated[
        str, "auto, imagenet, or cifar: two strides less (auto: for up to 64 pixels)"
    ] = "auto"


@dataclass(frozen=True)
class SwinT(Torchvision):
    """torchvision's Swin Transformer V2, tiny (Liu et al. 2022)."""

    decays: ClassVar[str] = "matrices"  # Liu et al. 2022, in their code

    form: Annotated[
        str,
        "auto, imagenet, or cifar: patches of 2 pixels, windows of 4 (auto: for up to 64 pixels)",
    ] = "auto"
    include: Annotated[
        Sequence[str] | None,
        "feed-forward layers only (regular expressions for whole module names); null = all; "
        r"attention: '.*\.attn\.(qkv|proj)'",
    ] = (r".*\.mlp\.\d",)


@dataclass(frozen=True)
class SwinB(SwinT):
    """torchvision's Swin Transformer V2, base (Liu et al. 2022), 88 million parameters."""


@dataclass(frozen=True)
class Timm(Pretrained):
    """Any network of timm (needs nmrun[timm])."""

    decays: ClassVar[str] = "matrices"  # timm's own training, for all networks
    trained: ClassVar[bool] = True
    builder: ClassVar[str] = "nmrun.lab.models.images.of_timm"

    name_in_timm: Annotated[str, TEXT, "the first argument of timm.create_model"] = (
        "vit_tiny_patch16_224"
    )
    options: Annotated[
        dict[str, Any] | None,
        ARGUMENTS,
        "further keyword arguments of timm.create_model, such as {patch_size: 4}; null = none",
    ] = None


FEED_FORWARD = (
    "regular expressions for whole module names that may be sparse; null = all; "
    r"'h\.\d+\.mlp\..*' = feed-forward only"
)


@dataclass(frozen=True)
class Transformer(Model):
    """A Transformer."""

    decays: ClassVar[str] = "matrices"  # nanoGPT; DeiT's code; BERT's code
    data: ClassVar[str] = TEXTS

    layers: Annotated[int, whole(1), "blocks of attention and feed-forward layers"] = 2
    heads: Annotated[int, whole(1), "heads of attention in each layer"] = 4
    width: Annotated[
        int,
        whole(1),
        "width of embeddings and residual stream; the feed-forward layers are four times as wide",
    ] = 64
    dropout: Annotated[
        float, FRACTION, "dropout of embeddings, attention and both outputs of a layer"
    ] = 0.0


@dataclass(frozen=True)
class Activated(Transformer):
    """A Transformer with a choice of activation."""

    activation: Annotated[
        str,
        one_of("gelu", "relu2"),
        "activation of the feed-forward layers: gelu, or relu2 (the squared ReLU, most of "
        "whose outputs are 0)",
    ] = "gelu"


@dataclass(frozen=True)
class TextEncoder(Activated):
    """A small Transformer encoder for texts, from scratch (torch's nn.TransformerEncoder)."""

    builder: ClassVar[str] = "nmrun.lab.models.texts.TextEncoderNetwork"

    dropout: Annotated[float, "dropout of embeddings, attention and both parts of a layer"] = 0.1


@dataclass(frozen=True)
class GPT(Activated):
    """GPT-2's architecture."""

    data: ClassVar[str] = RUNNING_TEXT
    builder: ClassVar[str] = "nmrun.lab.models.texts.GPTNetwork"

    bias: Annotated[bool, FLAG, "biases in linear layers and norms; nanoGPT has none"] = True
    include: Annotated[Sequence[str] | None, FEED_FORWARD] = None


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
    builder: ClassVar[str] = "nmrun.lab.models.texts.gpt_classifier"

    context: Annotated[
        int, whole(1), "number of positions: dataset.context of the run that is fine-tuned"
    ] = 1024
    embeddings: Annotated[
        int | None,
        whole(4, optional=True),
        "number of tokens of the run that is fine-tuned; null = as many as the data have",
    ] = None


@dataclass(frozen=True)
class ViT(Activated):
    """Vision Transformers."""

    data: ClassVar[str] = IMAGES
    builder: ClassVar[str] = "nmrun.lab.models.images.vit"

    patch: Annotated[
        int | None,
        whole(1, optional=True),
        "pixels of a patch's side; null = 16, or 4 for images below 64 pixels",
    ] = None
    stochastic_depth: Annotated[
        float,
        FRACTION,
        "probability that training leaves out the last layer; for the layers before it "
        "linearly less",
    ] = 0.0
    layers: int = 12
    width: Annotated[
        int, "width of the residual stream; the feed-forward layers are four times as wide"
    ] = 192
    heads: int = 3
    dropout: Annotated[float, "dropout of embeddings and of both outputs of a layer"] = 0.0
    include: Annotated[
        Sequence[str] | None,
        "feed-forward layers only (regular expressions for whole module names); null = all; "
        r"queries and keys: '.*\.(query|key)'",
    ] = (r".*\.mlp\.\d",)


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
    builder: ClassVar[str] = "nmrun.lab.models.hugging_face.causal"

    pretrained: Annotated[
        str, TEXT, "a name on the hub, or a folder that save_pretrained wrote"
    ] = "gpt2"


@dataclass(frozen=True)
class HFGPT2(HFCausal):
    """A pretrained GPT-2 from Hugging Face, for fine-tuning (needs nmrun[transformers])."""

    builder: ClassVar[str] = "nmrun.lab.models.hugging_face.gpt2"

    dropout: Annotated[
        float, FRACTION, "dropout of embeddings, attention and both outputs of a layer"
    ] = 0.1
    include: Annotated[Sequence[str] | None, FEED_FORWARD] = None


@dataclass(frozen=True)
class HFEncoder(Model):
    """Any encoder of Hugging Face with a new head, for fine-tuning (needs nmrun[transformers])."""

    decays: ClassVar[str] = "matrices"  # BERT's code, and the Trainer of transformers
    data: ClassVar[str] = TEXTS
    builder: ClassVar[str] = "nmrun.lab.models.hugging_face.encoder"

    pretrained: Annotated[
        str, TEXT, "a name on the hub, or a folder with config.json, weights and tokenizer"
    ] = "bert-base-uncased"
    pooling: Annotated[
        str,
        one_of("cls", "mean"),
        "what the head sees: cls (first token, through the encoder's pooler if it has one), or "
        "mean (of all tokens)",
    ] = "cls"
    dropout: Annotated[
        float, FRACTION, "dropout before the head; the encoder's own is in its config.json"
    ] = 0.1
    exclude: Annotated[
        Sequence[str] | None,
        "all linear layers of the encoder are sparse; embeddings, pooler and head stay dense",
    ] = (".*pooler.*|head",)
