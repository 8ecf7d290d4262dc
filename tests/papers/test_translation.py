"""Translation through fairseq: batches, loss, beam search, BLEU, its data on disk; against fairseq
itself, formulas and brute force.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import one_line
from runs import config, cut_off, finished, result_of, resumed
from torch import nn

from nmrun.errors import ConfigError
from nmrun.lab import models, tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.train.optimizers import scheduled
from nmrun.papers.translation import prepare
from nmrun.papers.translation.data import JOINED
from nmrun.papers.translation.fairseq import Dictionary, dictionary, fairseq
from nmrun.papers.translation.task import Corpus, Translation

pytest.importorskip("sacrebleu", reason="needs nmrun[translation]")
SMALL = ("model.width=16", "model.ffn=16", "model.layers=1", "model.heads=2")
RUN = ("dataset=copy_reverse", "model=fairseq_transformer", *SMALL, "dataset.size=200", "dataset.val_size=8", "dataset.test_size=8",
       "dataset.max_tokens=128", "dataset.beam=2", "trainer.label_smoothing=0.1", "trainer.accumulate=2")  # fmt: skip


# in a process of its own: another test may have imported fairseq in this one
SURROUNDINGS = """
import logging, sys, warnings
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from nmrun.papers.translation import data, prepare, task
from nmrun.papers.translation.fairseq import fairseq

def surroundings():
    store, root, hydra = ConfigStore.instance().repo, logging.getLogger(), GlobalHydra.instance()
    names = {group: sorted(nodes) if isinstance(nodes, dict) else nodes for group, nodes in store.items()}
    logs = root.level, list(root.handlers), root.manager.disable
    return names, *logs, list(warnings.filters), hydra.is_initialized(), id(hydra)

assert "fairseq" not in sys.modules, "the data or the task import it"
before = surroundings()
fairseq("models.transformer")
assert "fairseq.models.transformer" in sys.modules
assert surroundings() == before
assert "config.yaml" not in before[0]
"""


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import fairseq's own models and losses, which tests compare with."""
    fairseq("models.transformer")


def corpora(number: int = 300, seed: int = 0, words: int = 20) -> tuple[Corpus, Corpus, Dictionary]:
    """Random sentences whose sides have lengths of their own."""
    random = np.random.default_rng(seed)
    vocabulary = dictionary(f"w{i}" for i in range(words))
    lines = [
        [*random.integers(4, 4 + words, random.integers(1, 9)).tolist(), 2]
        for _ in range(2 * number)
    ]
    return Corpus.of(lines[:number]), Corpus.of(lines[number:]), vocabulary


def translation(max_tokens: int = 64, seed: int = 0, **options: Any) -> Translation:
    source, target, vocabulary = corpora()
    few, some, _ = corpora(8, seed=1)
    references = {split: ["w1 w2"] * 8 for split in ("val", "test")}
    splits = {"train": (source, target), "val": (few, some), "test": (few, some)}
    return Translation(
        splits, vocabulary, vocabulary, references, " ".join, max_tokens, seed, **options
    )


def transformer(task: Translation, **options: Any) -> nn.Module:
    small = {"width": 16, "ffn": 32, "layers": 2, "heads": 2, "share_embeddings": "auto"}
    undropped = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    torch.manual_seed(0)
    named = {"name": "fairseq_transformer", **small, **undropped, **options}
    return models.build(named, task.inputs)


def sentences(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens[a:b].tolist() for a, b in itertools.pairwise(corpus.starts)]


def padded(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The target as fairseq has it, from the tokens and their places."""
    _, previous, where, target = batch
    full = torch.full_like(previous, 1).flatten()
    return full.index_copy(0, where, target).view_as(previous)


def decoded(batch: tuple[torch.Tensor, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs in a batch, read from source and from target with its places, without the task's
    own code.
    """
    source, previous, where, target = (tensor.numpy() for tensor in batch)
    sides: dict[int, list[int]] = {}
    for place, token in zip(where, target, strict=True):
        sides.setdefault(place // previous.shape[1], []).append(int(token))
    return [
        (tuple(int(t) for t in line if t != 1), tuple(sides[row]))
        for row, line in enumerate(source)
    ]


# --- the import -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_importing_fairseq_changes_neither_hydra_nor_logging():
    subprocess.run([sys.executable, "-c", SURROUNDINGS], check=True)


# --- batches --------------------------------------------------------------------------------------


def test_an_epoch_has_each_sentence_once_in_batches_of_at_most_max_tokens():
    task = translation(max_tokens=64)
    rows = zip(*(map(tuple, sentences(side)) for side in task.splits["train"]), strict=True)
    expected, orders, together = sorted(rows), [], []
    for epoch in (0, 1):
        batches = [task.micro_batches(epoch, i, 1)[0] for i in range(task.batches_per_epoch)]
        for tokens, previous, _, following in batches:
            assert max(tokens.numel(), previous.numel()) <= 64
            assert task.size((tokens, previous, following)) == len(following)
        pairs = [pair for batch in batches for pair in decoded(batch)]
        assert sorted(pairs) == expected
        orders.append(pairs)
        together.append({frozenset(decoded(batch)) for batch in batches})
    assert orders[0] != orders[1]
    assert together[0] != together[1]
    # batches are of sentences of about the same length: little padding
    every = torch.cat([batch[0].flatten() for batch in batches])
    assert (every == 1).double().mean() < 0.1


def test_batches_are_a_function_of_seed_and_epoch_alone():
    first, second, other = translation(seed=3), translation(seed=3), translation(seed=4)
    second.micro_batches(7, 2, 1)
    for index in (4, 0):
        (a,), (b,), (c,) = (task.micro_batches(5, index, 1) for task in (first, second, other))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert decoded(a) != decoded(c)


def test_batches_are_those_of_fairseqs_collater():
    task = translation()
    (batch,) = task.micro_batches(0, 0, 1)
    collate = fairseq("data.language_pair_dataset").collate
    samples = [
        {"id": i, "source": torch.tensor(s), "target": torch.tensor(t)}
        for i, (s, t) in enumerate(decoded(batch))
    ]
    theirs = collate(samples, pad_idx=1, eos_idx=2)
    order = theirs["id"]
    assert torch.equal(theirs["net_input"]["src_tokens"], batch[0][order])
    assert torch.equal(theirs["net_input"]["prev_output_tokens"], batch[1][order])
    assert torch.equal(theirs["target"], padded(batch)[order])
    assert task.size(batch) == theirs["ntokens"]


def test_parts_of_a_batch_make_up_the_whole():
    task = translation(label_smoothing=0.1)
    model = transformer(task)
    (whole,) = task.micro_batches(0, 2, 1)
    parts = task.micro_batches(0, 2, 3)
    assert [pair for part in parts for pair in decoded(part)] == decoded(whole)
    mean = sum(task.loss(model, part).item() * task.size(part) for part in parts) / task.size(whole)
    assert mean == pytest.approx(task.loss(model, whole).item(), rel=1e-5)
    assert len(task.micro_batches(0, 2, 1000)) == len(decoded(whole))


# --- model and loss -------------------------------------------------------------------------------


def test_the_loss_is_fairseqs_label_smoothed_cross_entropy():
    task = translation(label_smoothing=0.2)
    model = transformer(task)
    (batch,) = task.micro_batches(0, 0, 1)
    source, previous, _, following = batch
    inputs = {"src_tokens": source, "src_lengths": None, "prev_output_tokens": previous}
    sample = {"net_input": inputs, "target": padded(batch), "ntokens": len(following)}
    losses = fairseq("criterions.label_smoothed_cross_entropy")
    criterion = losses.LabelSmoothedCrossEntropyCriterion
    theirs, size, _ = criterion(Namespace(target_dictionary=task.target), False, 0.2)(model, sample)
    assert float(task.loss(model, batch)) == pytest.approx(theirs.item() / size, rel=1e-5)


def test_the_model_computes_what_fairseqs_own_does():
    task = translation()
    ours = transformer(task, share_embeddings="decoder")
    base = fairseq("models.transformer").TransformerModelBase
    theirs = base.build_model(
        ours.cfg, Namespace(source_dictionary=task.source, target_dictionary=task.target)
    )
    theirs.load_state_dict(ours.state_dict())
    batches = (task.micro_batches(0, i, 1)[0] for i in range(task.batches_per_epoch))
    # both sides with padding
    source, previous, where, _ = next(b for b in batches if all((t == 1).any() for t in b[:2]))
    for mode in (True, False):
        mine = ours.train(mode)(source, None, previous, where)[0]
        expected = theirs.train(mode)(source, None, previous)[0]
        torch.testing.assert_close(mine, expected.flatten(0, 1)[where], rtol=1e-4, atol=1e-5)
    # no value is ever looked at
    logits = ours.to("meta")(*(tensor.to("meta") for tensor in (source, source, previous)))[0]
    assert logits.shape == (*previous.shape, len(task.target))


def test_embeddings_are_shared_as_asked_and_stay_dense():
    task = translation()
    tied = transformer(task)  # one dictionary: auto means all
    task.inputs = {"source": task.source, "target": dictionary(["other"])}
    for model, count in ((tied, 1), (transformer(task), 2)):
        embeddings = model.encoder.embed_tokens, model.decoder.embed_tokens
        heads = (*embeddings, model.decoder.output_projection)
        assert len({id(each.weight) for each in heads}) == count
    for wrong in ({"share_embeddings": "all"}, {"width": 17}):
        with one_line(ConfigError, "^model: "):
            transformer(task, **wrong)


# --- beam search and BLEU -------------------------------------------------------------------------


def test_translations_are_matched_with_the_references_of_their_sentences(monkeypatch):
    """A model that only copies: BLEU is 100 if and only if each translation meets its own
    reference.
    """
    source, _, vocabulary = corpora(40)
    task = translation()
    lines = sentences(source)
    plain = [" ".join(vocabulary.symbols[token] for token in line[:-1]) for line in lines]
    task.splits = {"train": task.splits["train"], "val": (source, source)}
    task.references = {"val": plain}

    def copying(self, models, sample, **_):
        return [[{"tokens": line}] for line in sample["net_input"]["src_tokens"]]

    monkeypatch.setattr(fairseq("sequence_generator").SequenceGenerator, "generate", copying)
    model = transformer(task).eval()
    metrics = task.evaluate(model, "val")
    assert metrics["bleu"] == pytest.approx(100)
    total, count = 0.0, 0
    for line in lines:  # each sentence alone
        tokens = torch.tensor([line])
        logits = model(tokens, None, tokens.roll(1))[0][0].detach().double()
        total -= float(logits.log_softmax(-1).gather(1, tokens.T).sum())
        count += tokens.numel()
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    search = task._search(model)
    assert (search.beam_size, search.len_penalty) == (task.beam, task.length_penalty) == (5, 1.0)
    task.references = {"val": plain[::-1]}
    metrics = task.evaluate(transformer(task).eval(), "val")
    assert metrics["bleu"] < 50
    assert next(name for name in metrics if name != "loss") == task.metric  # what status shows
    assert "tok:13a" in task.notes["bleu"]
    assert "version:" in task.notes["bleu"]


def test_symbols_become_plain_text():
    assert JOINED["none"](["a", "b"]) == "a b"
    assert JOINED["sentencepiece"](["▁A", "▁ca", "t", "."]) == "A cat."
    assert JOINED["subword_nmt"](["A", "ca@@", "t", "s@@"]) == "A cat s"


# --- data on disk ---------------------------------------------------------------------------------

GERMAN = [
    "ein Hund läuft .",
    "eine Katze schläft .",
    "ein Hund schläft .",
    "zwei Hunde laufen schnell .",
]
ENGLISH = ["a dog runs .", "a cat sleeps .", "a dog sleeps .", "two dogs run fast ."]


def written(folder: Path, german: list[str] = GERMAN, english: list[str] = ENGLISH) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test", "val", "test_2016_flickr"):
        for side, lines in (("de", german), ("en", english)):
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")
    return folder


def preprocessed(tmp_path: Path, *options: str, english: list[str] = ENGLISH) -> Path:
    """A folder that fairseq's own program has written."""
    raw = written(tmp_path / "raw", english=english)
    words = ["-s", "de", "-t", "en", "--destdir", str(tmp_path / "bin"), "--workers", "1", *options]
    for split in ("train", "valid", "test"):
        words += [f"--{split}pref", str(raw / split)]
    parser = fairseq("options").get_preprocessing_parser()
    from fairseq_cli import preprocess

    root, warned = logging.getLogger(), logging.root.manager.disable
    handlers = list(root.handlers)
    logging.disable(logging.CRITICAL)
    try:
        preprocess.main(parser.parse_args(words))
    finally:
        logging.disable(warned)
        root.handlers[:] = handlers
    return tmp_path / "bin"


def built(tmp_path: Path, *overrides: str) -> Translation:
    task = tasks.build(
        config(tmp_path, "model=fairseq_transformer", *overrides), torch.device("cpu")
    )
    assert isinstance(task, Translation)
    return task


@pytest.mark.parametrize("options", [(), ("--joined-dictionary",)])
def test_folders_of_fairseq_preprocess_are_read_as_they_are(tmp_path, options):
    folder = preprocessed(tmp_path, *options)
    task = built(tmp_path, "dataset=fairseq", f"dataset.path={folder}")
    sides = zip(task.splits["train"], (task.source, task.target), (GERMAN, ENGLISH), strict=True)
    for corpus, words, lines in sides:
        texts = [" ".join(words.symbols[token] for token in line) for line in sentences(corpus)]
        assert texts == [f"{line} </s>" for line in lines]
    assert task.references["test"] == ENGLISH
    assert (task.source == task.target) == bool(options)


def test_data_lie_in_the_folder_of_data_or_here(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece")
    preprocessed(tmp_path)
    written(tmp_path / "multi30k")
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    for data, here in ((tmp_path, tmp_path / "empty"), (tmp_path / "empty", tmp_path)):
        monkeypatch.setenv("NMRUN_DATA", str(data))
        monkeypatch.chdir(here)
        for words in (
            ("dataset=fairseq", "dataset.path=bin"),
            ("dataset=multi30k", "dataset.vocabulary=48"),
        ):
            assert built(tmp_path, *words).references["test"] == ENGLISH


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path):
    folder, short = preprocessed(tmp_path), preprocessed(tmp_path / "short", english=ENGLISH[:3])
    for suffix in ("bin", "idx"):  # a test text with one sentence less on one side
        (short / f"test.de-en.en.{suffix}").replace(folder / f"test.de-en.en.{suffix}")
    for place, line in (
        (folder, "test: 4 source sentences and 3 target sentences"),
        (tmp_path, "there is none"),
        (short, "there is no .*idx"),
    ):
        with one_line(ConfigError, line):
            built(tmp_path, "dataset=fairseq", f"dataset.path={place}")


def test_prepared_text_comes_back_and_only_once_is_prepared(tmp_path, monkeypatch):
    pytest.importorskip("sentencepiece")
    written(tmp_path / "multi30k", [*GERMAN, "", "nur hier"], [*ENGLISH, "only here", " "])
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))
    words = ("dataset=multi30k", "dataset.vocabulary=48", "dataset.max_tokens=256")
    task = built(tmp_path, *words)
    assert task.references["val"] == [*ENGLISH, "only here", " "]  # the raw text, as it is
    # training pairs with an empty side are left out
    for corpus, lines in zip(task.splits["train"], (GERMAN, ENGLISH), strict=True):
        pieces = [[task.target.symbols[t] for t in line[:-1]] for line in sentences(corpus)]
        assert [task.detokenize(some) for some in pieces] == lines
    assert task.source == task.target
    monkeypatch.setattr("nmrun.papers.translation.data.prepare", None)
    assert len(built(tmp_path, *words).splits["train"][0]) == 4
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(
        ConfigError, match=r"multi30k/train.de: there is no such file, nor with .gz"
    ):
        built(tmp_path, *words)


def test_a_damaged_gz_is_refused_with_its_name(tmp_path):
    packed = bytearray(gzip.compress("".join(f"line {n * n}\n" for n in range(400)).encode()))
    packed[40:60] = bytes(20)
    (tmp_path / "train.de.gz").write_bytes(packed)
    with pytest.raises(ConfigError, match=r"train\.de\.gz: "):
        prepare.read(tmp_path / "train.de.gz")


def test_prepare_writes_a_whole_folder_or_nothing(tmp_path, capsys, monkeypatch):
    pytest.importorskip("sentencepiece")
    raw, to = written(tmp_path / "raw"), tmp_path / "to" / "here"
    words = [f"--{split}={raw / split}" for split in ("train", "valid", "test")]
    monkeypatch.setattr(prepare, "LONGEST", 20)
    assert prepare.main([*words, "--out", str(to), "--vocabulary", "48"]) == 0
    data = ("dataset=fairseq", f"dataset.path={to}", "dataset.subwords=sentencepiece")
    task = built(tmp_path, *data)
    assert task.references["test"] == ENGLISH
    assert task.source == task.target
    assert max(task.splits["train"][0].lengths) <= 21
    assert str(to) in capsys.readouterr().out
    with pytest.raises(ConfigError, match="it is there already"):
        prepare.main([*words, "--out", str(to)])
    elsewhere = [*words, "--out", str(tmp_path / "else")]
    with pytest.raises(ConfigError, match="vocabulary=8000: sentencepiece cannot learn it"):
        prepare.main(elsewhere)
    for more, message in (
        ("--source de-AT", "two names of letters"),
        ("--target de", "two names of letters"),
        ("--vocabulary 99999999999", "sentencepiece cannot learn it"),
        ("--vocabulary 0", "4 or more"),
        ("--out /proc/none", "/proc/none"),
    ):
        with pytest.raises((ConfigError, OSError), match=message):
            prepare.main([*elsewhere, *more.split()])
    (raw / "valid.de").rename(raw / "kept.de")
    for file in ("valid.de", "valid.en"):
        (raw / file).write_text("")
    with pytest.raises(ConfigError, match=r"valid\.de: there is no pair of sentences"):
        prepare.main([*elsewhere, "--vocabulary", "48"])
    (raw / "kept.de").replace(raw / "valid.de")
    for content, message in (
        (b"one\ntwo\n", r"valid.de and .*valid.en: 4 and 2 lines"),
        (b"\xff\n", r"valid\.en: .*utf-8"),
    ):
        (raw / "valid.en").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            prepare.main(elsewhere)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "to"]
    assert [path.name for path in to.parent.iterdir()] == ["here"]


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    schedule = ("schedule=inverse_sqrt", "schedule.warmup_steps=4")
    words = (*RUN, "recipe=step", "recipe.switch=0.5", *schedule)
    resumed(tmp_path, *words, by=cut_off)
    folder = run_folder(config(tmp_path / "cut", *words))
    result = result_of(folder)
    assert "tok:13a" in result["notes"]["bleu"]
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])
    embeddings = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")
    left = {left["name"] for left in result["sparsity"]["left_dense"]}
    assert left == {f"{name}.weight" for name in embeddings}


@pytest.mark.slow
def test_a_budget_is_for_batches_of_all_lengths(tmp_path):
    """Also where the first batch of an epoch is not like the others."""
    budget = 2e8
    data = ("dataset.size=100", "dataset.max_tokens=64", "trainer.limit_batches=null")
    words = (*RUN, *data, "recipe=dense", f"trainer.budget=flops:{budget}")
    result = finished(config(tmp_path, *words, "trainer.test=false"))
    assert result["flops"]["training_arithmetic"] == pytest.approx(budget, rel=0.02)


def test_inverse_sqrt_is_fairseqs_schedule():
    module = fairseq("optim.lr_scheduler.inverse_square_root_schedule")
    lrs: list[float] = []
    optimizer = Namespace(set_lr=lrs.append)
    options = module.InverseSquareRootLRScheduleConfig(
        warmup_updates=7, warmup_init_lr=1e-5, lr=[2e-3]
    )
    theirs = module.InverseSquareRootSchedule.__new__(module.InverseSquareRootSchedule)
    theirs.optimizer, theirs.cfg = optimizer, options
    module.FairseqLRScheduler.__init__ = lambda self, *_: None
    module.InverseSquareRootSchedule.__init__(theirs, options, optimizer)
    options = {"name": "inverse_sqrt", "warmup_steps": 7, "init_lr": 1e-5}
    factor = scheduled(options, 2e-3, 40)
    for step in range(1, 40):
        assert 2e-3 * factor(step) == pytest.approx(theirs.step_update(step), rel=1e-9)
    assert 2e-3 * factor(0) == pytest.approx(lrs[0])
