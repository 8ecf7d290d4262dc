"""Language modelling: the objective and its metrics, windows, tokens, files, and what is wrong with
them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from errors import one_line
from torch import nn
from verbs import verb

from nmrun.errors import ConfigError, RunError
from nmrun.lab import tasks
from nmrun.lab.compare.notation import LOWER_IS_BETTER
from nmrun.lab.config.identity import run_folder
from nmrun.lab.keys.datasets import StdlibText
from nmrun.lab.tasks.text import files
from nmrun.lab.tasks.text.language import LanguageModelling
from nmrun.lab.train import flops

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))


def numbered(
    train: int = 1000,
    val: int = 103,
    test: int = 57,
    context: int = 10,
    batch_size: int = 6,
    **options,
) -> LanguageModelling:
    """Splits that are stretches of one count: a token is its own position, so a window tells where
    it is from.
    """
    ends = list(itertools.accumulate((train, val, test), initial=0))
    splits = {
        n: np.arange(a, b, dtype=np.uint16)
        for n, (a, b) in zip(("train", "val", "test"), itertools.pairwise(ends), strict=True)
    }
    return LanguageModelling(splits, ends[-1], context, batch_size, **{"seed": 0, **options})


class Table(nn.Module):
    """Logits that depend on the present token alone; ``seen`` has all that it was asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits, self.seen = nn.Parameter(logits), []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens)
        return self.logits[tokens]


# --- objective and metrics ------------------------------------------------------------------------


def test_metrics_are_those_of_the_bigram_model_summed_by_hand():
    rng = np.random.default_rng(0)
    splits = {name: rng.integers(7, size=200).astype(np.uint8) for name in ("train", "val", "test")}
    task = LanguageModelling(splits, 7, context=9, batch_size=4, seed=0, unit="byte")
    logits = torch.randn(7, 7)
    chances = (logits.double().exp() / logits.double().exp().sum(1, keepdim=True)).numpy()
    loss = -sum(math.log(chances[a, b]) for a, b in itertools.pairwise(splits["test"])) / 199
    metrics = task.evaluate(Table(logits), "test")
    assert metrics == {
        "loss": pytest.approx(loss, rel=1e-5),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "bits_per_byte": pytest.approx(loss / math.log(2), rel=1e-5),
    }
    assert set(metrics) <= LOWER_IS_BETTER
    assert task.higher_is_better is False


def test_a_hopeless_model_has_an_infinite_perplexity():
    logits = torch.full((1160, 1160), 0.0)
    logits[:, 0] = 5000.0
    assert numbered().evaluate(Table(logits), "val")["perplexity"] == math.inf


def test_label_smoothing_is_for_training_alone():
    plain, smooth = numbered(), numbered(label_smoothing=0.1)
    model = Table(torch.randn(1160, 1160))
    assert plain.evaluate(model, "val") == smooth.evaluate(model, "val")
    (batch,) = plain.micro_batches(0, 0, 1)
    logs = model.logits[batch[0]].log_softmax(-1)
    expected = -(0.9 * logs.gather(2, batch[1][:, :, None]).mean() + 0.1 * logs.mean())
    torch.testing.assert_close(smooth.loss(model, batch), expected)


def test_the_compiled_loss_is_the_same(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    )
    task, model = numbered(compiled=True, label_smoothing=0.1), Table(torch.randn(1160, 1160))
    (batch,) = task.micro_batches(0, 0, 1)
    losses = [one.loss(model, batch) for one in (task, numbered(label_smoothing=0.1))]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, model.logits)[0] for loss in losses))


class OfAllBefore(nn.Module):
    """Logits that depend on every token of the window up to the present one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.each = nn.Parameter(torch.randn(vocabulary, vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return self.each[tokens].cumsum(1) / places.sqrt()


@pytest.mark.parametrize("stride", [None, 9, 5, 4, 1])
@pytest.mark.parametrize("length", [10, 11, 33, 37])
def test_a_sliding_window_token_by_token(stride, length):
    """Of each token the first window counts that has it, from the window's beginning on."""
    text = np.random.default_rng(1).integers(7, size=length).astype(np.uint8)
    splits = {"train": np.zeros(200, np.uint8), "val": text}
    task = LanguageModelling(splits, 7, context=9, batch_size=3, seed=0, stride=stride)
    torch.manual_seed(0)
    model = OfAllBefore(7)
    step, losses = stride or 9, []
    for place in range(1, length):
        begin = next(b for b in range(0, length, step) if place <= b + 9)
        before = torch.from_numpy(text[begin:place].astype(np.int64))
        chances = model(before[None])[0, -1].double().log_softmax(-1)
        losses.append(-float(chances[int(text[place])].detach()))
    loss = task.evaluate(model, "val")["loss"]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_stride_that_would_leave_tokens_out():
    with pytest.raises(ConfigError, match=r"dataset\.stride=11: it takes at most .*context=10"):
        numbered(stride=11)


# --- batches --------------------------------------------------------------------------------------


def test_windows_are_stretches_of_the_training_text_and_targets_come_next():
    task = numbered()
    for epoch, index in itertools.product(range(4), range(task.batches_per_epoch)):
        (batch,) = task.micro_batches(epoch, index, 1)
        tokens, following = batch
        assert tokens.shape == following.shape == (6, 10)
        assert tokens.dtype == following.dtype == torch.int64
        assert torch.equal(following, tokens + 1)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(10))
        assert following.max() < 1000  # never into the next split
        assert task.size(batch) == 60


def test_every_start_is_as_likely():
    task = numbered(train=16, val=11, test=11, context=10, batch_size=1)
    starts = [task.micro_batches(epoch, 0, 1)[0][0][0, 0].item() for epoch in range(600)]
    counts = np.bincount(starts)
    assert len(counts) == 6  # the last window ends with the last token
    # chi-squared with 5 degrees of freedom, p = 0.001
    assert ((counts - 100) ** 2 / 100).sum() < 20.5


def test_batches_depend_on_seed_epoch_and_index_alone():
    def tokens(task, *place):
        return task.micro_batches(*place, 1)[0][0]

    one, other = numbered(seed=3), numbered(seed=3)
    later = tokens(one, 5, 7)
    for index in range(4):
        tokens(other, 0, index)
    assert torch.equal(later, tokens(other, 5, 7))
    for seed, *place in ((3, 5, 8), (3, 7, 5), (3, 6, 7), (5, 3, 7), (4, 5, 7)):
        assert not torch.equal(later, tokens(numbered(seed=seed), *place))


@pytest.mark.parametrize("parts", [1, 2, 4, 6])
def test_micro_batches_are_the_batch_in_parts(parts):
    task = numbered()
    batches = task.micro_batches(2, 3, parts)
    assert [len(batch[0]) for batch in batches] in ([6], [3, 3], [2, 2, 1, 1], [1] * 6)
    (whole,) = task.micro_batches(2, 3, 1)
    for place in (0, 1):
        assert torch.equal(torch.cat([batch[place] for batch in batches]), whole[place])


def test_an_epoch_is_the_windows_that_fit_side_by_side():
    # 999 targets, 60 a batch
    assert numbered(train=1000, context=10, batch_size=6).batches_per_epoch == 16
    assert numbered(train=601, context=10, batch_size=6).batches_per_epoch == 10
    assert numbered(limit_batches=3).batches_per_epoch == 3


def test_too_short_a_text_is_refused():
    with pytest.raises(ConfigError, match=r"dataset\.context=10: the val text has only 10 tokens"):
        numbered(val=10)
    numbered(val=11)
    with pytest.raises(ConfigError, match=r"batch_size=6: .* 60 tokens, 5 windows .* 5 at most"):
        numbered(train=60)
    assert numbered(train=61).batches_per_epoch == 1


def test_a_token_outside_the_vocabulary_stops_the_run():
    task = numbered()
    task.splits["val"][50] = 1160
    with pytest.raises(RunError, match=r"the val text has the token 1160, outside .* 1160"):
        task.evaluate(Table(torch.zeros(1160, 1160)), "val")


# --- tokens ---------------------------------------------------------------------------------------


def test_characters_of_all_splits_are_numbered_in_order():
    texts = {"train": "zebra ä\n", "val": "a𝄞b", "test": "Z"}
    alphabet = sorted(set("".join(texts.values())))
    arrays, size = files.encode({name: some.encode() for name, some in texts.items()}, "character")
    assert size == len(alphabet)
    assert {name: "".join(alphabet[i] for i in array) for name, array in arrays.items()} == texts


def test_words_by_the_training_text_with_an_end_to_each_line():
    texts = {"train": b"the cat <unk> \n\n the  dog\n", "val": b"the bird\ndog", "test": b"cat"}
    arrays, size = files.encode(texts, "word")
    words = ["the", "cat", "<unk>", "<eos>", "dog"]
    assert size == 5
    read = {name: " ".join(words[i] for i in array) for name, array in arrays.items()}
    assert read == {
        "train": "the cat <unk> <eos> <eos> the dog <eos>",
        "val": "the <unk> <eos> dog <eos>",
        "test": "cat <eos>",
    }


@pytest.mark.parametrize(
    ("text", "level", "message"),
    [
        (b"the\ncat bird", "word", "'bird' is not in the vocabulary of the training text"),
        (b"ab\xff", "character", r"not UTF-8 \(dataset\.tokenizer=byte takes any\): .*0xff in position 2"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_tokens(text, level, message):
    with one_line(ConfigError, message):
        files.encode({"train": b"the cat\n", "val": text, "test": b""}, level)


def test_a_hugging_face_tokenizer_loses_nothing(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers", reason="needs nmrun[transformers]")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    sentence = "to be or not to be, that is the question\n\n"
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([sentence] * 9, trainer)
    bpe.enable_truncation(3)
    bpe.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(files, "PIECE", 100)  # so that the text is cut
    texts = {"train": sentence * 20 + "or not", "val": "not ä question\n", "test": ""}
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    encoded = {split: some.encode() for split, some in texts.items()}
    for name in (tmp_path, tmp_path / "tokenizer.json", f"~/{tmp_path.name}"):
        arrays, size = files.encode(encoded, str(name))
        assert size == bpe.get_vocab_size() > 256
        assert {split: bpe.decode(array.tolist()) for split, array in arrays.items()} == texts
        assert len(arrays["train"]) < len(texts["train"]) / 2
    (tmp_path / "tokenizer.json").write_text("{}")
    with one_line(ConfigError, r"^dataset\.tokenizer=.*no tokenizer has that name"):
        files.encode({"train": b"a"}, str(tmp_path))


# --- files ----------------------------------------------------------------------------------------


def build(tmp_path: Path, *overrides: str) -> LanguageModelling:
    options = ("model=gpt_tiny", "dataset.context=8", "trainer.batch_size=4", *overrides)
    return tasks.build(runs.config(tmp_path, *options), DEVICE)


def test_splits_are_cut_from_the_end_after_white_space(tmp_path):
    words = [f"word{i}" for i in range(500)]
    file = tmp_path / "all.txt"
    file.write_text(" ".join(words))
    shares = ("dataset.val_fraction=0.1", "dataset.test_fraction=0.2")
    task = build(tmp_path, "dataset=text", f"dataset.train={file}", *shares)
    parts = [task.splits[split].tobytes().decode() for split in ("train", "val", "test")]
    assert "".join(parts) == " ".join(words)
    assert [word for part in parts for word in part.split()] == words  # none is cut
    sizes = [len(part) / file.stat().st_size for part in parts]
    assert sizes == pytest.approx([0.7, 0.1, 0.2], abs=0.005)


def test_own_files_are_found_in_the_folder_of_data_and_taken_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path / "data"))
    folder = tmp_path / "data" / "corpus"
    folder.mkdir(parents=True)
    for name in ("train", "val", "test"):
        (folder / f"{name}.txt").write_text(f"{name} \xff" * 50, "latin-1")  # no UTF-8
        np.arange(100, dtype=np.uint16).tofile(folder / f"{name}.bin")
    names = [f"dataset.{name}=corpus/{name}.txt" for name in ("train", "val", "test")]
    texts = build(tmp_path, "dataset=text", "dataset.tokenizer=byte", *names)
    assert texts.vocabulary == 256
    for name, tokens in texts.splits.items():
        assert bytes(tokens.tolist()) == f"{name} \xff".encode("latin-1") * 50
    numbers = build(tmp_path, "dataset=token_bin", "dataset.folder=corpus")
    assert numbers.splits["test"].tolist() == list(range(100))
    with pytest.raises(ConfigError, match=r"^dataset: .*nowhere"):
        build(tmp_path, "dataset=text", names[0], f"dataset.val={tmp_path / 'nowhere'}")


def test_words_are_encoded_once_until_a_file_changes(tmp_path, monkeypatch):
    file, calls = tmp_path / "all.txt", []
    encode = files.encode
    monkeypatch.setattr(files, "encode", lambda *a: calls.append(a) or encode(*a))
    options = ("dataset=text", f"dataset.train={file}", "dataset.tokenizer=word")
    file.write_text("one two <unk>\n" * 100)
    first, again = build(tmp_path, *options), build(tmp_path, *options)
    assert len(calls) == 1
    assert again.vocabulary == first.vocabulary == 4
    for name in ("train", "val", "test"):
        assert np.array_equal(first.splits[name], again.splits[name])
    file.write_text("one two three <unk>\n" * 100)
    assert build(tmp_path, *options).vocabulary == 5
    assert len(calls) == 2


def test_another_tokenizer_in_the_home_folder_encodes_anew(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers", reason="needs nmrun[transformers]")
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "all.txt").write_text("one two " * 200)
    options = ("dataset=text", f"dataset.train={file}", "dataset.tokenizer='~/mine'")
    (tmp_path / "mine").mkdir()
    for words in ({"one": 0, "two": 1}, {"two": 0, "one": 1, "three": 2}):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "mine" / "tokenizer.json"))
        task = build(tmp_path, *options)
        assert task.vocabulary == len(words)
        assert task.splits["train"][:2].tolist() == [words["one"], words["two"]]


def test_missing_data_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    with one_line(ConfigError, rf"no tinyshakespeare/input\.txt .*{tmp_path}.*char-rnn$"):
        build(tmp_path, "dataset=shakespeare")


@pytest.mark.parametrize("form", ["wiki.{}.tokens", "{}.txt"])
def test_wikitext_as_published(tmp_path, monkeypatch, form):
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    (tmp_path / "wikitext-103").mkdir()
    for split in ("train", "valid", "test"):
        text = f" \n = {split} <unk> = \n \n" * 30
        (tmp_path / "wikitext-103" / form.format(split)).write_text(text)
    with pytest.raises(ConfigError, match="no wikitext-2/"):
        build(tmp_path, "dataset=wikitext2")
    task = build(tmp_path, "dataset=wikitext103")
    assert task.unit == "word"
    assert task.vocabulary == 4  # <eos> = train <unk>
    assert task.splits["train"][:8].tolist() == [0, 1, 2, 3, 1, 0, 0, 0]
    assert task.splits["val"][:8].tolist() == [0, 1, 3, 3, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("dataset", "least"), [("stdlib_text", 20_000), ("stdlib_text_all", 100_000)]
)
def test_the_library_is_one_text_on_one_machine(tmp_path, dataset, least):
    texts = files.stdlib_sources(dataset)
    assert [name for name, some in texts.items() if len(some) > least] == ["train", "val", "test"]
    assert b"class ArgumentParser" in texts["train"]
    config = runs.config(tmp_path, "model=gpt_tiny", f"dataset={dataset}")
    assert config.dataset.as_kind(StdlibText).sha256 == files.stdlib_digest(dataset)
    task = tasks.build(config, DEVICE)
    assert {name: task.splits[name].tobytes() for name in texts} == texts
    with pytest.raises(ConfigError, match=r"dataset\.sha256=0123: .* has another text"):
        build(tmp_path, f"dataset={dataset}", "dataset.sha256='0123'")


def test_all_of_the_library_has_no_tests_and_nothing_of_the_machine(tmp_path):
    others = ["site-packages/torch.py", "test/a.py", "json/tests/b.py", "_sysconfigdata_x86.py"]
    modules = [f"{package}m{number:02}.py" for package in ("", "json/") for number in range(80)]
    for name in [*others, *modules]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    splits = files.all_modules(tmp_path)
    assert sorted(itertools.chain(*splits.values())) == sorted(modules)
    assert [len(splits[name]) for name in ("train", "val", "test")] == [152, 4, 4]


def test_a_python_without_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(files.sysconfig, "get_path", lambda name: str(tmp_path))
    with one_line(ConfigError, r"dataset=stdlib_text: .* without its source: .*argparse"):
        files.stdlib_sources.__wrapped__("stdlib_text")


# --- nanoGPT's files ------------------------------------------------------------------------------


def write(path: Path, tokens, dtype: type = np.uint16) -> Path:
    np.asarray(tokens, dtype).tofile(path)
    return path


def test_token_files_are_mapped(tmp_path):
    write(tmp_path / "train.bin", np.arange(2000) % 700)
    write(tmp_path / "val.bin", np.arange(300, 500))
    options = ("dataset=token_bin", f"dataset.folder={tmp_path}", "dataset.vocabulary=700")
    task = build(tmp_path, *options)
    assert isinstance(task.splits["train"], np.memmap)
    assert task.inputs == {"vocabulary": 700, "context": 8}
    assert set(task.splits) == {"train", "val"}
    assert not task.has_test
    (batch,) = task.micro_batches(1, 2, 1)
    assert torch.equal(batch[1], (batch[0] + 1) % 700)
    write(tmp_path / "test.bin", [5] * 50)
    assert build(tmp_path, *options).has_test


def test_without_a_test_text_nothing_is_called_test(tmp_path, capsys):
    write(tmp_path / "train.bin", np.arange(2000) % 7)
    write(tmp_path / "val.bin", np.arange(300) % 7)
    text = (f"dataset.folder={tmp_path}", "dataset.vocabulary=8")
    cfg = runs.config(tmp_path / "out", "dataset=token_bin", *text, *TEXT[:-1], "recipe=ste")
    result = runs.finished(cfg)
    names = {"eval/loss", "eval/perplexity", "eval/bits_per_token"}
    assert set(result["metrics"]["final"]) == names
    assert set(result["metrics"]["best"]) == names | {"epoch", "step", "candidates"}
    capsys.readouterr()
    assert verb("table", str(tmp_path / "out")) == 0
    assert "validation perplexity" in capsys.readouterr().out


def test_what_is_wrong_with_a_token_file(tmp_path):
    write(tmp_path / "odd.bin", [1, 2, 3], np.uint8)
    write(tmp_path / "empty.bin", [])
    write(tmp_path / "wide.bin", range(50), np.uint32)
    write(tmp_path / "large.bin", [0, 1, 50257])
    for name, message in {
        "odd": "tokens of 16 bits",
        "empty": "empty file",
        "wide": "every second of these is 0, so they probably have 32",
        "large": r"has the token 50257, outside dataset\.vocabulary=50257",
        "missing": "No such file",
    }.items():
        with one_line(ConfigError, rf"{name}\.bin.*{message}"):
            files.read_tokens(tmp_path / f"{name}.bin", 50257)
    assert files.read_tokens(write(tmp_path / "good.bin", [0, 50256]), 50257).tolist() == [0, 50256]


# --- whole runs -----------------------------------------------------------------------------------

TEXT = (
    "model=gpt_tiny",
    "model.width=16",
    "dataset.context=16",
    "trainer.batch_size=8",
    "trainer.limit_batches=10",
    "optimizer.lr=0.01",
)


def test_a_run_learns(tmp_path):
    """A text that is easy to learn: the alphabet over and over."""
    file = tmp_path / "abc.txt"
    file.write_text("abcdefghijklmnopqrstuvwxy\n" * 400)  # with somewhere to cut
    shares = ("dataset.val_fraction=0.04", "dataset.test_fraction=0.04")
    text = ("dataset=text", f"dataset.train={file}", "dataset.tokenizer=character", *shares)
    cfg = runs.config(tmp_path, *TEXT, *text, "recipe=step", "trainer.epochs=10")
    result = runs.finished(cfg)
    final = result["metrics"]["final"]
    assert final["test/perplexity"] < 5  # 26 by chance
    assert final["test/bits_per_character"] == pytest.approx(math.log2(final["test/perplexity"]))
    assert [layer["holds"] for layer in result["sparsity"]["layers"]] == [True] * 8
    # 2 layers of width 16 and a head of 26 tokens: 6 FLOPs a weight and token, and attention's two
    # products, thrice as well
    each = 6 * (2 * 12 * 16**2 + 26 * 16) + 3 * 2 * 2 * 2 * 16 * 16
    assert result["flops"]["training_dense"] == 100 * 8 * 16 * each
    for line in (run_folder(cfg) / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)  # speed is in tokens
        if "items_per_second" in row:
            assert row["items_per_second"] == pytest.approx(row["steps_per_second"] * 8 * 16)


def test_resumed_in_the_middle_the_bits_are_the_same(tmp_path):
    for name, length in (("train", 3000), ("val", 200)):
        write(tmp_path / f"{name}.bin", np.random.default_rng(0).integers(60, size=length))
    data = ("dataset=token_bin", f"dataset.folder={tmp_path}", "dataset.vocabulary=64")
    words = (*TEXT, *data, "model.dropout=0.1", "recipe=step", "trainer.epochs=2")
    runs.resumed(tmp_path, *words)


DATA = Path(os.environ.get("NMRUN_DATA", "~/.cache/nmrun")).expanduser()


@pytest.mark.skipif(
    not (DATA / "tinyshakespeare/input.txt").exists(),
    reason="tiny Shakespeare is not in NMRUN_DATA",
)
def test_tiny_shakespeare(tmp_path):
    task = build(tmp_path, "dataset=shakespeare")
    assert sum(len(task.splits[name]) for name in ("train", "val", "test")) == 1_115_394
    assert task.vocabulary == 65


def test_flops_are_counted_without_the_compiler(monkeypatch):
    """On the meta device, where nothing can be compiled; large networks are counted there."""
    monkeypatch.setattr(flops, "COMPUTED", 0)
    model = nn.Sequential(nn.Embedding(1160, 8), nn.Linear(8, 1160))
    counts = [flops.count(model, numbered(compiled=compiled)) for compiled in (False, True)]
    assert counts[0].dense == counts[1].dense == 2 * 8 * 1160 * 3
