"""GPT-2 in Hugging Face's Trainer, on the text of a Python module: a callback makes it sparse.

pip install '.[huggingface]'
python -m examples.huggingface_trainer [FOLDER]
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from nmrun.integrations.huggingface import NMTrainerCallback

set_seed(0)
text = Path(argparse.__file__).read_text(encoding="ascii")
rows = torch.tensor([ord(letter) for letter in text]).unfold(0, 64, 64)
data = [{"input_ids": row, "labels": row} for row in rows]

config = GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=2)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    tempfile.mkdtemp(),
    num_train_epochs=1,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    logging_steps=10,
    save_strategy="steps",
    save_steps=20,
    report_to="none",
    use_cpu=True,
)
sparse = NMTrainerCallback("sr_ste", "2:4")
trainer = Trainer(model, arguments, train_dataset=data, callbacks=[sparse])
trainer.train()
if len(sys.argv) > 1:
    trainer.save_model(sys.argv[1])
