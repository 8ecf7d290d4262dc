"""A pretrained GPT-2 of Hugging Face, with linear layers in place of its transposed ones."""

from __future__ import annotations

from nmrun.errors import ConfigError
from nmrun.lab.models.gpt import GPTNetwork
from nmrun.lab.tasks.hugging_face import fetch, fetch_whole

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


def build(vocabulary: int, context: int, pretrained: str, dropout: float) -> GPTNetwork:
    """Load a pretrained network.

    Raises:
        ConfigError: where it cannot be loaded, is no GPT-2, has another vocabulary than the data or
            a shorter context, or has weights that do not fit its ``config.json``.
    """
    where = f"model.pretrained={pretrained}"
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    for key, value in FIXED.items():
        found = getattr(config, key, None)
        if found != value and not (key == "n_inner" and found == 4 * config.n_embd):
            raise ConfigError(
                f"{where}: another architecture than GPT-2's: {key} is {found}, where it takes {value}"
            )
    if config.vocab_size != vocabulary:
        raise ConfigError(
            f"{where}: it knows {config.vocab_size} tokens and the data have {vocabulary}: take its own tokenizer (dataset.tokenizer)"
        )
    if config.n_positions < context:
        raise ConfigError(
            f"dataset.context={context}: {pretrained} takes at most {config.n_positions} tokens"
        )
    theirs = fetch_whole("GPT2LMHeadModel", pretrained, config=config)
    model = GPTNetwork(
        vocabulary, config.n_positions, config.n_layer, config.n_head, config.n_embd, dropout
    )
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()
    }
    model.load_state_dict({n: t.T if n.endswith(TRANSPOSED) else t for n, t in weights.items()})
    return model
