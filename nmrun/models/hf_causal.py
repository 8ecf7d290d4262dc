"""Any pretrained causal language model of Hugging Face (Llama, Qwen, Mistral, Phi, ...), for
fine-tuning and pruning.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.tasks.pretrained import check_vocabulary, fetch, fetch_whole


class CausalLM(nn.Module):
    """Tokens (B, T) to logits (B, T, vocabulary).

    Args:
        network: a model of transformers, as ``AutoModelForCausalLM`` makes it.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(tokens, use_cache=False).logits

    def get_output_embeddings(self) -> nn.Module:
        """The head, as transformers' models name theirs."""
        return self.network.get_output_embeddings()


def build(vocabulary: int, context: int, pretrained: str) -> CausalLM:
    """Load a pretrained network in float32. Its dropout is that of its ``config.json``.

    Args:
        vocabulary: the number of tokens of the data.
        context: the longest sequence of the data, in tokens.
        pretrained: a folder, or a name on the hub.

    Raises:
        ConfigError: where it cannot be loaded, is no causal language model, has another vocabulary
            than the data or a shorter context, or has weights that do not fit its ``config.json``.
    """
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    config = config.get_text_config()
    known, longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
    check_vocabulary(pretrained, known, vocabulary)
    if longest is not None and longest < context:
        raise ConfigError(f"dataset.context={context}: {pretrained} takes at most {longest} tokens")
    return CausalLM(fetch_whole("AutoModelForCausalLM", pretrained))
