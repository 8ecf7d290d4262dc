"""An exported language model in lm-eval: a zero-shot task of files at hand, against the likelihoods
by the model itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs
import torch

from nmrun.lab.config.identity import run_folder
from nmrun.lab.export import cli
from nmrun.lab.train.runner import run

transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
pytest.importorskip("lm_eval", reason="needs nmrun[lmeval]")

pytestmark = pytest.mark.slow

WORDS = ("[UNK]", "the", "cat", "sat", "dog", "ran", "mat", "on", "a", "end")
ITEMS = [
    ("the cat", "sat", "mat"),
    ("a dog", "the", "ran"),
    ("on a", "mat", "on"),
    ("a", "dog", "cat"),
]
TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""


def trained(folder: Path) -> Path:
    """The folder of a finished 2:4 run of a tiny Llama, with its tokenizer beside."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    whole = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="[UNK]", eos_token="end", pad_token="end"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=9, eos_token_id=9,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    (folder / "text.txt").write_text("the cat sat on a mat a dog ran on the mat " * 100)
    asked = runs.config(
        folder, "dataset=text", f"dataset.train={folder}/text.txt", f"dataset.tokenizer={folder}/llama",
        "dataset.context=16", "model=hf_causal", f"model.pretrained={folder}/llama", "recipe=ste",
        "optimizer.lr=0.02", "trainer.batch_size=8",
    )  # fmt: skip
    assert run(asked, run_folder(asked))["status"] == "finished"
    return run_folder(asked)


def test_its_accuracy_is_that_of_the_likelihoods(tmp_path):
    to = tmp_path / "hf"
    assert cli.export([str(trained(tmp_path)), "--out", str(to), "--format", "hf"]) == 0
    lines = [json.dumps({"question": q, "choices": choices}) for q, *choices in ITEMS]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "items.jsonl").write_text("\n".join(lines))
    (tasks / "mine.yaml").write_text(TASK.format(data=tasks / "items.jsonl"))
    words = f"--model hf --model_args pretrained={to} --tasks mine --include_path {tasks}"
    process = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words.split(), "--device", "cpu"],
        capture_output=True, text=True, timeout=300, check=True,
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    (row,) = (line for line in process.stdout.splitlines() if line.startswith("|mine"))
    model = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    right = 0
    for question, *choices in ITEMS:
        asked = torch.tensor([[WORDS.index(word) for word in question.split()]])
        with torch.no_grad():
            scores = model(asked).logits[0, -1]
        right += bool(scores[WORDS.index(choices[0])] > scores[WORDS.index(choices[1])])
    assert 0 < right < len(ITEMS)  # else any rule would do
    assert float(row.split("|")[7]) == pytest.approx(right / len(ITEMS), abs=1e-3)
