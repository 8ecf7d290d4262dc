"""A small Llama in trl's SFTTrainer, by adapters that keep it 2:4 (SQFT): no merge is left to do.

pip install '.[integrations]'
python -m examples.trl_sft [FOLDER]
"""

import argparse
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from nmrun.integrations.huggingface import NMTrainerCallback

set_seed(0)
lines = [line for line in Path(argparse.__file__).read_text().splitlines() if len(line) > 40]
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(lines, vocab_size=512, special_tokens=["<end>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", pad_token="<end>")

config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=128,
)  # fmt: skip
model = LlamaForCausalLM(config)  # a pruned model of from_pretrained keeps its masks
arguments = SFTConfig(
    tempfile.mkdtemp(),
    num_train_epochs=1,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    max_length=64,
    bf16=False,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
data = Dataset.from_dict({"text": lines})
sparse = NMTrainerCallback("sqft", "2:4", rank=8)
trainer = SFTTrainer(
    model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[sparse]
)
trainer.train()
if len(sys.argv) > 1:
    trainer.save_model(sys.argv[1])
