"""Text of a language model and classes of a classifier, against what training and evaluation compute."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from errors import one_line
from pictures import make_folder
from PIL import Image
from runs import config, finished
from torch.nn import functional
from verbs import verb

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.export import cli, finished_run
from nmrun.lab.tasks.text import files
from nmrun.lab.tasks.text.classification import TextClassification
from nmrun.lab.tasks.text.labelled import generated_reviews
from nmrun.lab.tasks.vision import Classification
from nmrun.ranges import SEED

TEXT = "the quick brown fox\njumps over the lazy dog\n" * 40


def trained(folder: Path, *words: str) -> Path:
    cfg = config(folder, "recipe=sr_ste", *words)
    finished(cfg)
    return run_folder(cfg)


def test_each_token_is_drawn_from_the_softmax_of_the_last_logits():
    shares = torch.tensor([0.1, 0.2, 0.7])

    def follows(tokens: torch.Tensor) -> torch.Tensor:
        """The number after the last one is likeliest; a fourth token is none of the vocabulary's."""
        assert tokens.shape[1] <= 4
        rolled = torch.stack([shares.roll(int(last) + 2) for last in tokens[0]])
        return functional.pad(rolled.log(), (0, 1), value=9.0)[None]

    assert cli.continued(follows, [0], 5, 4, 3, temperature=0) == [0, 1, 2, 0, 1, 2]
    drawn = cli.continued(follows, [0, 1], 3000, 4, 3, seed=1)
    steps = torch.tensor([(b - a) % 3 for a, b in itertools.pairwise(drawn)])
    found = steps.bincount(minlength=3) / 3000
    # a step of one has the share 0.7, of two 0.1, of none 0.2
    torch.testing.assert_close(found, torch.tensor([0.2, 0.7, 0.1]), rtol=0, atol=0.03)
    cold = cli.continued(follows, [0], 3000, 4, 3, temperature=0.5)
    ones = sum((b - a) % 3 == 1 for a, b in itertools.pairwise(cold)) / 3000
    assert ones == pytest.approx(0.49 / (0.49 + 0.04 + 0.01), abs=0.03)  # the squares of the shares


@pytest.mark.parametrize("tokenizer", ["byte", "character", "word"])
def test_a_codec_gives_the_tokens_of_the_training_and_the_text_again(tokenizer):
    arrays, _ = files.encode({"train": TEXT.encode()}, tokenizer)
    codec = files.codec(lambda: {"train": TEXT.encode()}, tokenizer)
    text = TEXT[: len(TEXT) // 40]
    numbers = [*codec.encode(text)]
    assert numbers == arrays["train"][: len(numbers)].tolist()
    assert codec.decode(numbers) == text
    if tokenizer == "byte":
        assert [*codec.encode(os.fsdecode(b"a\xffb"))] == [*b"a\xffb"]  # as a command's words are
    else:
        with one_line(ConfigError, "'Q' is not in the vocabulary"):
            [*codec.encode("Q")]


def test_every_end_of_a_line_is_one_again():
    text = "\n\nthe cat sat\n\n = Title =\nthe cat\n"
    made = files.codec(lambda: {"train": text.encode()}, "word")
    assert made.decode([*made.encode(text)]) == "\n\nthe cat sat\n\n= Title =\nthe cat\n"


def test_sample_continues_the_prompt(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text(TEXT)
    run = trained(
        tmp_path, "dataset=text", f"dataset.train={tmp_path}/mine.txt", "dataset.context=16",
        "dataset.tokenizer=character", "model=gpt_tiny", "model.width=16", "trainer.batch_size=4",
    )  # fmt: skip
    texts = []
    for seed in ("1", "1", "2"):
        capsys.readouterr()
        words = ("--prompt", "the quick", "--tokens", "30", "--seed", seed)
        assert verb("sample", str(run), *words) == 0
        texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("the quick") and len(text) == 39 for text in texts)
    assert verb("sample", str(run), "--prompt", "Z") == 2
    assert verb("predict", str(run), str(tmp_path / "mine.txt")) == 2
    assert verb("sample", str(run), "--seed", str(2**63)) == 2
    said = capsys.readouterr().err.splitlines()
    assert "'Z' is not in the vocabulary of the training text" in said[0]
    assert "nmrun sample takes language models" in said[1]
    assert said[2:] == [f"nmrun: argument --seed: {2**63}: it takes {SEED.allowed}"]
    assert verb("sample", str(run), "--tokens", "1", "--seed", str(2**63 - 1)) == 0


@pytest.mark.slow
def test_predict_says_what_an_evaluation_computes_of_images(tmp_path, capsys):
    make_folder(tmp_path / "images", splits={"train": 20, "val": 4, "test": 4})
    run = trained(
        tmp_path, "dataset=image_folder", f"dataset.path={tmp_path}/images",
        "trainer.batch_size=8", "trainer.epochs=3",
    )  # fmt: skip
    model, task = finished_run.network(finished_run.read(run))
    assert isinstance(task, Classification)
    images, labels = task.splits["test"]
    with torch.no_grad():
        expected = model(task.normalise(images)).softmax(1)
    files = sorted((tmp_path / "images" / "test").rglob("*.png"))
    assert len(files) == len(labels) == 12
    capsys.readouterr()
    assert verb("predict", str(run), *map(str, files)) == 0
    found = [
        sorted(re.findall(r"(ant|bee|cat) (\d\.\d+)", line))
        for line in capsys.readouterr().out.splitlines()
    ]
    ours = torch.tensor([[float(share) for _, share in row] for row in found])
    gaps = (ours[:, None] - expected).abs().amax(-1)  # the split has them in another order
    assert gaps.shape == (12, 12)
    assert gaps.amin(0).max() < 6e-4
    assert gaps.amin(1).max() < 6e-4
    (tmp_path / "text.txt").write_text("no image")
    assert verb("predict", str(run), str(tmp_path / "text.txt")) == 2
    assert verb("predict", str(run), str(tmp_path / "nowhere.png")) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "text.txt is no image" in said[0]


@pytest.mark.slow
def test_predict_goes_by_the_run_and_not_by_the_data_as_they_are_now(tmp_path, capsys):
    place = make_folder(tmp_path / "images", splits={"train": 20, "val": 4, "test": 4})
    run = trained(
        tmp_path, "dataset=image_folder", f"dataset.path={place}", "trainer.batch_size=8",
        "trainer.epochs=2",
    )  # fmt: skip
    query = place / "test" / "cat" / "00.png"
    query.rename(tmp_path / "query.png")
    said = []
    for change in (False, True):
        if change:  # other means, and other names
            for file in (place / "train" / "ant").iterdir():
                Image.fromarray(np.full((8, 8, 3), 255, np.uint8)).save(file)
            for split in place.iterdir():
                (split / "bee").rename(split / "bumblebee")
        capsys.readouterr()
        assert verb("predict", str(run), str(tmp_path / "query.png")) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    for split in place.iterdir():  # a class more than the head has
        shutil.copytree(split / "cat", split / "dog")
    assert verb("predict", str(run), str(tmp_path / "query.png")) == 2
    assert "its data have changed since the run: " in capsys.readouterr().err


def test_digits_are_grey_and_of_their_own_range(tmp_path):
    run = trained(tmp_path)
    task = tasks.build(config(tmp_path, "recipe=sr_ste"), torch.device("cpu"))
    image = task.splits["test"][0][0]  # normalised
    of = finished_run.read(run).result["signature"]["input"]
    pixels = (image[0] * of["std"][0] + of["mean"][0]) / 16 * 255
    Image.fromarray(pixels.round().numpy().astype(np.uint8)).save(tmp_path / "digit.png")
    made = cli.image_input(tmp_path / "digit.png", of)
    torch.testing.assert_close(made, image, rtol=0, atol=0.01)  # half a step of 255


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # with a byte order mark
def test_predict_says_what_an_evaluation_computes_of_texts(encoding, tmp_path, capsys):
    run = trained(
        tmp_path, "dataset=generated_text", "dataset.size=200", "model=text_encoder",
        "model.width=16", "model.heads=2", "trainer.batch_size=16",
    )  # fmt: skip
    model, task = finished_run.network(finished_run.read(run))
    assert isinstance(task, TextClassification)
    texts, _ = generated_reviews(200)["test"]
    rows, outputs = task.tally(model, "test")["test"]
    expected = outputs[rows.argsort()].double().softmax(1)[:5]
    lines = "".join(f"{text}\n" for (text,) in texts[:5])
    (tmp_path / "texts.txt").write_text(lines, encoding=encoding)
    capsys.readouterr()
    assert verb("predict", str(run), str(tmp_path / "texts.txt")) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, shares, (text,) in zip(lines, expected, texts[:5], strict=True):
        said, _, of = line.partition("\t")
        assert of == text
        number, share = said.split()
        assert int(number) == int(shares.argmax())
        assert float(share) == pytest.approx(float(shares.max()), abs=6e-4)
    (tmp_path / "texts.txt").write_text("one\none\ttwo\n")
    assert verb("predict", str(run), str(tmp_path / "texts.txt")) == 2
    said = capsys.readouterr()
    assert "line 2: it takes one text without a tab" in said.err
    assert not said.out
    (tmp_path / "texts.txt").write_text("", encoding=encoding)
    assert verb("predict", str(run), str(tmp_path / "texts.txt")) == 2
    said = capsys.readouterr()
    assert "texts.txt: it is empty" in said.err
    assert not said.out
