"""A small encoder of Hugging Face with its tokenizer, and one as GPT-2's, as people have them on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "is", "was", "good", "bad", "great"),
    *("awful", "a", "film", "not", "##ly", "quick"),
)
BERT = {
    "model_type": "bert", "vocab_size": len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32, "type_vocab_size": 2, "pad_token_id": 0,
}  # fmt: skip


def save_encoder(folder: Path, **changes: Any) -> Path:
    """A random BERT with its tokenizer, in Hugging Face's layout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = transformers.BertModel(transformers.BertConfig(**{**BERT, **changes}))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "model_max_length": 32})
    )
    return folder


def save_tokenizer(folder: Path, **tokens: str) -> Path:
    """A tokenizer of bytes that adds no token to a text, as GPT-2's; ``tokens`` are special ones."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **tokens).save_pretrained(folder)
    return folder
