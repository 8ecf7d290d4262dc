"""Forward passes of language models, dense and packed: a prompt, or one new token after 128 others.

    python benchmarks/language_inference.py [--models gpt2] [--prompt] [--tokens 1x512] [--sparsity 2:4]
        [--precisions bf16] [--arms torch compiled packed packed_compiled] [--rounds 12] [--out DIR]

Weights are random; transformers builds the models. Sizes are sequences x tokens of a prompt; without
``--prompt`` they are sequences, each with one new token.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from nmrun.lab.bench import harness, infer
from nmrun.lab.bench.harness import Benchmark, Case
from nmrun.lab.bench.options import ARMS, sequences
from nmrun.patterns import Pattern

PAST = 128  # tokens that a decoder has in its cache
ATTENTION = "nmrun_causal"  # of a name that transformers makes no masks for
# layers, width, heads
SIZES = {
    "gpt2": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
    "llama_7b_block": (2, 4096, 32),  # two of the 32 blocks, with the embeddings
}


class Decoder(nn.Module):
    """A language model of transformers.

    Args:
        name: of ``SIZES``.
        past: how many sequences it has in its cache, each of PAST tokens; None for a prompt, without
            a cache, of which the last token alone goes through the head.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, name: str, past: int | None) -> None:
        super().__init__()
        layers, width, heads = SIZES[name]
        config: Any = GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
        if name.startswith("llama"):
            config = LlamaConfig(
                num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads
            )
        # transformers makes a mask for attention of its own names when it is compiled, and with a
        # mask there is no flash attention
        AttentionInterface.register(ATTENTION, sdpa_attention_forward)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
        self.has_past = past is not None
        shape = layers, past or 0, heads, PAST, width // heads
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_past:
            last: Tensor = self.model(x, use_cache=False, logits_to_keep=1).logits
            return last
        cache: Any = DynamicCache()
        for keys, values in zip(self.keys, self.values, strict=True):
            layer: Any = DynamicLayer()
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            cache.layers.append(layer)
        output: Tensor = self.model(x, past_key_values=cache).logits
        return output


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["gpt2"])
    parser.add_argument("--prompt", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=sequences, default=[(1, 1)])
    parser.add_argument("--sparsity", nargs="+", type=Pattern.parse, default=[Pattern(2, 4)])
    parser.add_argument("--precisions", nargs="+")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = infer.device_of(options.device)
    arms = infer.chosen(options.arms, options.sparsity, options.precisions, device)

    def cases() -> Iterator[Case]:
        for name in options.models:
            for size in options.tokens:
                torch.manual_seed(0)
                past = None if options.prompt else size[0] * size[1]
                model = Decoder(name, past).eval().to(device)
                x = torch.randint(32000, size if options.prompt else (size[0] * size[1], 1))
                title = f"{name}, {'a prompt' if options.prompt else 'new tokens'}"
                yield infer.case(title, size, model, x.to(device), arms)

    command = shlex.join(["python", *sys.argv])
    clock = harness.Clock(device)
    page = partial(infer.page, clock=clock)
    benchmark = Benchmark(cases(), page, clock, options.rounds, infer.compared)
    harness.run("language_inference", benchmark, options.out, command)


if __name__ == "__main__":
    main()
