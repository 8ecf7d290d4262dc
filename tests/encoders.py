"""A small encoder of Hugging Face with its tokenizer, as people have it on disk."""

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
