"""Pretrained networks of Hugging Face, for fine-tuning and pruning: causal language models, and
encoders with a new head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.tasks.hugging_face import check_length, check_vocabulary, fetch, fetch_whole


class Wrapped(nn.Module):
    """A network of transformers whose ``forward`` takes what a task gives."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def get_output_embeddings(self) -> nn.Module:
        """The head, as transformers' models name theirs."""
        return self.network.get_output_embeddings()


class CausalLM(Wrapped):
    """Tokens (B, T) to logits (B, T, vocabulary), by what ``AutoModelForCausalLM`` makes."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(tokens, use_cache=False).logits


def causal(vocabulary: int, context: int, pretrained: str) -> CausalLM:
    """A pretrained network in float32. Its dropout is that of its ``config.json``.

    Raises ConfigError where it cannot be loaded, is no causal language model, or has another
    vocabulary than the data or a shorter context.
    """
    whole = fetch("AutoConfig", "model.pretrained", pretrained)
    config = whole.get_text_config()
    from transformers.models.auto import modeling_auto as known

    # encoders have a class with a causal head too, and work in it as encoders unless they say otherwise
    encodes = whole.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(
        whole, "is_decoder", False
    )
    if encodes or whole.model_type not in known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"model.pretrained={pretrained}: {whole.model_type} is no causal language model"
        )
    check_vocabulary(pretrained, config.vocab_size, vocabulary)
    longest = getattr(config, "max_position_embeddings", None)
    check_length("dataset.context", context, pretrained, longest)
    return CausalLM(fetch_whole("AutoModelForCausalLM", pretrained))


# the only values that are supported, by the names of Hugging Face's config
FIXED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "tie_word_embeddings": True,
}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def gpt2(vocabulary: int, context: int, pretrained: str, dropout: float) -> GPTNetwork:
    """A pretrained GPT-2, with linear layers in place of its transposed ones.

    Raises ConfigError where it cannot be loaded, is no GPT-2, has another vocabulary than the data
    or a shorter context.
    """
    where = f"model.pretrained={pretrained}"
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    for key, value in FIXED.items():
        actual = getattr(config, key, None)
        if actual != value and not (key == "n_inner" and actual == 4 * config.n_embd):
            raise ConfigError(
                f"{where}: another architecture than GPT-2's: {key} is {actual}, where it takes {value}"
            )
    check_vocabulary(pretrained, config.vocab_size, vocabulary, unused=0)
    check_length("dataset.context", context, pretrained, config.n_positions)
    theirs = fetch_whole("GPT2LMHeadModel", pretrained, config=config)
    model = GPTNetwork(
        vocabulary, config.n_positions, config.n_layer, config.n_head, config.n_embd, dropout
    )
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
    }
    model.load_state_dict({n: t.T if n.endswith(TRANSPOSED) else t for n, t in weights.items()})
    return model


class EncoderClassifier(nn.Module):
    """An encoder as ``AutoModel`` makes it, and a linear ``head`` after dropout.

    Input tokens (B, T), mask (B, T) bool (False is padding), segments (B, T); output (B, classes).
    With ``pooling=cls`` the head sees the first token, through the encoder's own pooler if it has
    one; with ``mean`` that over a text's tokens.
    """

    def __init__(self, encoder: Any, classes: int, pooling: str, dropout: float) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(encoder.config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=0.02)  # as in BERT
        nn.init.zeros_(self.head.bias)
        self.has_segments = getattr(encoder.config, "type_vocab_size", 0) > 1

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        inputs = {"token_type_ids": segments} if self.has_segments else {}
        # transformers checks whether a mask pads anything, which a tensor without values (for
        # counting FLOPs) cannot say
        padding = None if mask.is_meta else mask.long()
        out = self.encoder(tokens, attention_mask=padding, **inputs)
        states = out.last_hidden_state
        if self.pooling == "mean":
            weights = mask[:, :, None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
        else:
            pooled = getattr(out, "pooler_output", None)
        return self.head(self.dropout(states[:, 0] if pooled is None else pooled))


def encoder(
    vocabulary: int,
    max_length: int,
    classes: int,
    pretrained: str,
    pooling: str,
    dropout: float,
) -> EncoderClassifier:
    """A classifier on a pretrained encoder, in float32.

    Raises ConfigError if it cannot be had, is no encoder or does not fit the data's tokens.
    """
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    if config.model_type not in ENCODERS or config.is_encoder_decoder:
        raise ConfigError(
            f"model.pretrained={pretrained}: {config.model_type} is no encoder such as BERT"
        )
    check_vocabulary(pretrained, config.vocab_size, vocabulary, unused=1)
    # a pooler may be missing: then it begins at random
    encoder = fetch_whole("AutoModel", pretrained, besides="pooler", config=config)
    most = getattr(config, "max_position_embeddings", None)
    positions = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    if most is not None and padding is not None:
        # RoBERTa and its kind: a text begins at the position after that of padding
        most -= padding + 1
    check_length("dataset.max_length", max_length, pretrained, most)
    return EncoderClassifier(encoder, classes, pooling, dropout)
