"""A tiny GPT-2 and its Trainer, for tests of the callback in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import nmrun

STEPS = 8
OTHERS = ("compute_metrics", "optimizers", "optimizer_cls_and_kwargs")  # no TrainingArguments
OPTIONS: dict[str, dict[str, Any]] = {
    "sr_ste": {"decay": 0.01},
    "s_ste": {},
    "asp": {"prune_at": 0.5},
    "step": {"switch": 0.5},
    "lbc": {},
    "maskllm": {"dense": 0.25},
    "sqft": {"rank": 4},
}


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def data(number: int = 64) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 40, (number, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in rows]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """With the Trainer's settings, for recipes that need nmrun's own."""
    return nmrun.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def trainer(folder: Path, callbacks: list[Any], **changes: Any) -> Trainer:
    """Eight steps of two micro-batches, with clipping and a linear decay of the learning rate."""
    model = changes.pop("model", None) or gpt2()
    others = {k: changes.pop(k) for k in OTHERS if k in changes}
    options = {
        "max_steps": STEPS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 0.01, "max_grad_norm": 0.5, "save_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "optim": "adamw_torch",
        "dataloader_pin_memory": False, **changes,
    }  # fmt: skip
    return Trainer(
        model,
        TrainingArguments(str(folder), **options),
        data_collator=collate,
        train_dataset=data(),
        eval_dataset=data(8),
        callbacks=callbacks,
        **others,
    )
