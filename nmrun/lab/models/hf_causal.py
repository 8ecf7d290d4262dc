"""Any pretrained causal language model of Hugging Face (Llama, Qwen, Mistral, Phi, ...), for
fine-tuning and pruning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab.tasks.hugging_face import check_vocabulary, fetch, fetch_whole


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

    Raises:
        ConfigError: where it cannot be loaded, is no causal language model (has no such head, or
            looks at later tokens), has another vocabulary than the data or a shorter context, or has
            weights that do not fit its ``config.json``.
    """
    whole = fetch("AutoConfig", "model.pretrained", pretrained)
    config = whole.get_text_config()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if whole.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"model.pretrained={pretrained}: {whole.model_type} has no causal head")
    known, longest = config.vocab_size, getattr(config, "max_position_embeddings", None)
    check_vocabulary(pretrained, known, vocabulary)
    if longest is not None and longest < context:
        raise ConfigError(f"dataset.context={context}: {pretrained} takes at most {longest} tokens")
    model = CausalLM(fetch_whole("AutoModelForCausalLM", pretrained))
    if looks_ahead(model):
        raise ConfigError(
            f"model.pretrained={pretrained}: its logits depend on later tokens, as an encoder's "
            "do: it is no causal language model"
        )
    return model


@torch.no_grad()
def looks_ahead(model: nn.Module) -> bool:
    """Whether the logits at a token depend on a later one: encoders (BERT) have a class with a causal
    head too, and work in it as encoders unless their ``config.json`` says ``is_decoder``.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    training = model.training
    model.eval()
    one, two = (model(torch.tensor([tokens]))[0, 0] for tokens in ([1], [1, 2]))
    model.train(training)
    return not torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(one.abs().max()))
