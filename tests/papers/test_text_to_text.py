"""GLUE as text to text: T5's words, its loss and its answers by transformers, a run. The networks
are tiny ones made here; nothing is downloaded.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from glue_files import FILES, write
from runs import config
from verbs import verb

from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.export import finished_run
from nmrun.lab.tasks.text import labelled
from nmrun.lab.train import build, flops, runner, weights
from nmrun.papers.text_to_text.task import ANSWERS, NOTHING, SCORES, TextToText, prompt

transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")

SMALL: dict[str, Any] = {
    "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "dropout_rate": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    return tmp_path / "data"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random T5 with a tokenizer of bytes that ends texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("t5")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"vocab_size": 295, "special_tokens": ["<pad>", "</s>"]}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = ["entailment not_entailment sentence1: sentence2:"] * 9
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    pretrained = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=128
    )
    pretrained.save_pretrained(folder)
    torch.manual_seed(2)
    config = transformers.T5Config(**SMALL, vocab_size=len(pretrained) + 5)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def t5_config(tmp_path: Path, saved: Path, task: str, *words: str) -> Any:
    return config(
        tmp_path,
        *("dataset=glue_text", f"dataset.task={task}", "model=hf_t5", f"model.pretrained={saved}"),
        *("trainer.batch_size=4", "trainer.epochs=1", "optimizer=adamw", *words),
    )


@pytest.mark.parametrize("task", labelled.TASKS)
def test_texts_and_answers_are_t5s(task, data, tmp_path, saved):
    texts, labels = FILES[task][3:]
    spec = labelled.TASKS[task]
    names, answers = spec.hub_texts or spec.texts, ANSWERS.get(task, spec.labels)
    (first,) = prompt(task, texts[0])
    assert first.startswith(f"{task} {min(names)}: ")
    assert f"{names[0]}: {texts[0][0]}" in first
    assert len(answers) == (0 if task == "stsb" else len(labelled.TASKS[task].labels))
    write(data, task, 16 * [line for line in FILES[task][2] if "torn" not in line])
    built = tasks.build(t5_config(tmp_path, saved, task), torch.device("cpu"))
    assert isinstance(built, TextToText)
    pretrained = transformers.AutoTokenizer.from_pretrained(saved)
    assert built.inputs == {"vocabulary": len(pretrained), "max_length": 128}
    plainly = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    decode = functools.partial(pretrained.decode, **plainly)
    pairs = {
        (decode(tokens[mask]), decode(target[target != NOTHING]))
        for index in range(built.batches_per_epoch)
        for batch in built.micro_batches(0, index, 1)
        for tokens, mask, target in zip(*batch, strict=True)
    }
    assert pairs == {
        (prompt(task, text)[0], f"{label:.1f}" if task == "stsb" else answers[int(label)])
        for text, label in zip(texts, labels, strict=True)
    }


def test_words_of_the_paper():
    """Raffel et al. 2020, appendix D."""
    assert prompt("rte", ("A.", "B.")) == ("rte sentence1: A. sentence2: B.",)
    assert prompt("qqp", ("Why?", "How?")) == ("qqp question1: Why? question2: How?",)
    assert prompt("sst2", ("it 's good",)) == ("sst2 sentence: it 's good",)
    assert prompt("mnli", ("It rains.", "Sun.")) == ("mnli hypothesis: Sun. premise: It rains.",)


def test_loss_and_answers_by_transformers(data, tmp_path, saved):
    write(data, "rte", 8 * FILES["rte"][2])
    asked_for = t5_config(tmp_path, saved, "rte")
    task = tasks.build(asked_for, torch.device("cpu"))
    model = weights.network(asked_for, task).eval()
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(saved).eval()
    (batch,) = task.micro_batches(0, 0, 1)
    tokens, mask, targets = batch
    expected = theirs(input_ids=tokens, attention_mask=mask.long(), labels=targets.contiguous())
    torch.testing.assert_close(task.loss(model, batch), expected.loss)
    assert task.size(batch) == int((targets >= 0).sum())
    assert task.sizes(0, 0, 2) == [task.size(part) for part in task.micro_batches(0, 0, 2)]
    scores = task.scores(model, batch)
    for number, answer in enumerate(task.answers):
        labels = answer[answer >= 0][None]
        for row in range(len(tokens)):
            one = {"input_ids": tokens[row : row + 1], "attention_mask": mask[row : row + 1].long()}
            by_mean = theirs(**one, labels=labels).loss * labels.shape[1]
            torch.testing.assert_close(scores[row, number], -by_mean, rtol=1e-4, atol=1e-4)


def test_the_nearest_score_is_the_answer():
    from nmrun.lab.tasks.text.classification import Words

    task = TextToText(
        {"train": ([("a",)] * 4, [0.0, 2.37, 3.15, 5.0])},
        *(Words(64, 8), [f"{s:.1f}" for s in SCORES], SCORES),
        *(("spearman",), 2, 0),
    )
    right = [task.answers[SCORES.index(score)].tolist() for score in (0.0, 2.4, 3.2, 5.0)]
    batches = [*task.micro_batches(0, 0, 1), *task.micro_batches(0, 1, 1)]
    targets = [row for batch in batches for row in batch[-1].tolist()]
    assert sorted(targets) == sorted(right)


@pytest.mark.parametrize("task", ["stsb", pytest.param("mnli", marks=pytest.mark.slow)])
def test_a_run(task, data, tmp_path, saved, monkeypatch):
    monkeypatch.setattr(flops, "COMPUTED", 0)  # as for large networks: counted without values
    write(data, task, 16 * FILES[task][2])
    asked_for = t5_config(tmp_path, saved, task, "recipe=mdgf_exponential", "sparsity=1:8")
    result = runner.run(asked_for, run_folder(asked_for))
    names = {"stsb": {"spearman", "pearson"}, "mnli": {"accuracy", "accuracy_mismatched"}}
    assert {f"test/{name}" for name in names[task]} <= set(result["metrics"]["final"])
    sparse = [weight.name for weight in build.build(asked_for).handle.sparse]
    assert len(sparse) == (2 + 2) * 2  # the feed-forward layers of encoder and decoder
    assert all("DenseReluDense.w" in name for name in sparse)


@pytest.mark.parametrize("task", ["cola", "stsb"])
def test_predict_says_the_likeliest_answer(task, data, tmp_path, saved, capsys):
    """By transformers' loss of each answer."""
    write(data, task, 16 * FILES[task][2])
    asked_for = t5_config(tmp_path, saved, task, "recipe=dense")
    runner.run(asked_for, run_folder(asked_for))
    model, _ = finished_run.network(finished_run.read(run_folder(asked_for)))
    encode = transformers.AutoTokenizer.from_pretrained(saved)
    prompts = [prompt(task, text)[0] for text in FILES[task][3]]
    (tmp_path / "prompts.txt").write_text("".join(f"{line}\n" for line in prompts))
    capsys.readouterr()
    assert verb("predict", str(run_folder(asked_for)), str(tmp_path / "prompts.txt")) == 0
    lines = capsys.readouterr().out.splitlines()
    answers = ANSWERS.get(task) or [f"{score:.1f}" for score in SCORES]
    for line, text in zip(lines, prompts, strict=True):
        said, _, of = line.partition("\t")
        answered, share = said.split()
        inputs, likely = encode(text, return_tensors="pt", return_token_type_ids=False), {}
        for answer in answers:
            labels = encode(answer, return_tensors="pt").input_ids
            with torch.no_grad():
                loss = model.network(**inputs, labels=labels).loss
            likely[answer] = float((-loss * labels.numel()).exp())
        best = max(likely, key=likely.__getitem__)
        assert (answered, of) == (best, text)
        assert float(share) == pytest.approx(likely[best] / sum(likely.values()), abs=6e-4)
