"""Turns texts into arrays of token numbers: by bytes, characters, words, or a tokenizer of Hugging
Face."""

from __future__ import annotations

import itertools
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nmrun.errors import ConfigError, needs, refused

LEVELS = ("byte", "character", "word")
END, UNKNOWN = "<eos>", "<unk>"
PIECE = 1 << 20  # characters that a Hugging Face tokenizer gets at once; pieces end with a line

Encoded = tuple[dict[str, NDArray[Any]], int]


def encode(texts: Mapping[str, bytes], tokenizer: str) -> Encoded:
    """Texts (UTF-8, by split) as arrays of token numbers, and the size of the vocabulary.

    ``byte`` has 256 tokens, and ``character`` those that occur in any of the texts, in the order of
    Unicode. ``word`` is what white space separates, with ``<eos>`` at the end of each line. Its
    vocabulary is that of the training text; another word is ``<unk>`` if that text has such a word
    itself. Anything else is a ``tokenizer.json``, a folder that has one, or a name on the Hugging
    Face hub.

    Raises ConfigError for a word outside the vocabulary, a text that is not UTF-8, and a tokenizer
    that cannot be had.
    """
    if tokenizer == "byte":
        return {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}, 256
    decoded = {name: _decode(name, text) for name, text in texts.items()}
    if tokenizer == "character":
        return _characters(decoded)
    return _words(decoded) if tokenizer == "word" else _pieces(decoded, tokenizer)


@dataclass(frozen=True)
class Codec:
    """How a text becomes token numbers, and these a text again."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def codec(read: Callable[[], Mapping[str, bytes]], tokenizer: str) -> Codec:
    """The codec of :func:`encode`, by the texts that ``read`` reads where their letters or words are
    the tokens. It raises ConfigError for a letter or word that is none."""
    if tokenizer == "byte":
        return Codec(
            lambda text: list(text.encode()),
            lambda numbers: bytes(numbers).decode(errors="replace"),
        )
    if tokenizer not in LEVELS:
        loaded = _tokenizer(tokenizer)
        return Codec(
            lambda text: loaded.encode(text, add_special_tokens=False).ids,
            lambda numbers: loaded.decode(list(numbers), skip_special_tokens=False),
        )
    texts = {name: _decode(name, text) for name, text in read().items()}
    if tokenizer == "character":
        tokens = sorted(set("".join(texts.values())))
        return Codec(
            lambda text: [_known(tokens, letter) for letter in text],
            lambda numbers: "".join(tokens[number] for number in numbers),
        )
    tokens = list(dict.fromkeys(itertools.chain.from_iterable(_lines(texts["train"]))))
    return Codec(
        lambda text: [_known(tokens, word) for word in text.replace("\n", f" {END} ").split()],
        lambda numbers: " ".join(tokens[number] for number in numbers).replace(f" {END} ", "\n"),
    )


def _known(tokens: list[str], token: str) -> int:
    token = token if token in tokens or UNKNOWN not in tokens else UNKNOWN
    if token not in tokens:
        raise ConfigError(f"{token!r} is not in the vocabulary of the training text")
    return tokens.index(token)


def _decode(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the {name} text is not UTF-8 (byte {error.start} of it is {text[error.start]:#04x}); dataset.tokenizer=byte takes any file"
        ) from None


def _characters(texts: Mapping[str, str]) -> Encoded:
    codes = {
        name: np.frombuffer(text.encode("utf-32-le"), np.uint32) for name, text in texts.items()
    }
    present = np.zeros(0x110000, bool)
    for of_text in codes.values():
        present |= np.bincount(of_text, minlength=len(present)) > 0
    number, size = np.cumsum(present) - 1, int(present.sum())
    return {name: number[of_text].astype(_smallest(size)) for name, of_text in codes.items()}, size


def _words(texts: Mapping[str, str]) -> Encoded:
    numbers: defaultdict[str, int] = defaultdict()
    # a new word of the training text gets the next number
    numbers.default_factory = numbers.__len__
    arrays = {
        "train": array(
            "i",
            itertools.chain.from_iterable(
                map(numbers.__getitem__, line) for line in _lines(texts["train"])
            ),
        )
    }
    index = dict(numbers)
    for name in texts.keys() - {"train"}:
        arrays[name] = array("i")
        for line, words in enumerate(_lines(texts[name]), 1):
            for word in words:
                number = index.get(word, index.get(UNKNOWN))
                if number is None:
                    raise ConfigError(
                        f"line {line} of the {name} text has the word {word!r}; the training text has neither it nor {UNKNOWN}"
                    )
                arrays[name].append(number)
    return {
        name: np.array(numbers, _smallest(len(index))) for name, numbers in arrays.items()
    }, len(index)


def _lines(text: str) -> Iterator[list[str]]:
    for line in text.removesuffix("\n").split("\n"):
        yield [*line.split(), END]


def _tokenizer(name: str) -> Any:
    with needs(f"dataset.tokenizer={name}: other than {', '.join(LEVELS)}", "transformers"):
        from tokenizers import Tokenizer
    place = Path(name).expanduser()
    file = place / "tokenizer.json" if place.is_dir() else place
    none = f"dataset.tokenizer={name}: not {', '.join(LEVELS)}, and no tokenizer has that name: "
    with refused(none, Exception):  # the library raises bare Exceptions
        tokenizer = (
            Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pieces(texts: Mapping[str, str], name: str) -> Encoded:
    tokenizer = _tokenizer(name)
    size = tokenizer.get_vocab_size()
    encoded = {}
    for split, text in texts.items():
        numbers = [
            np.array(piece.ids, _smallest(size))
            for cut in _cut(text)
            for piece in tokenizer.encode_batch([cut], add_special_tokens=False)
        ]
        encoded[split] = np.concatenate(numbers) if numbers else np.empty(0, _smallest(size))
    return encoded, size


def _cut(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        end = text.find("\n", begin + PIECE) + 1 or len(text)
        yield text[begin:end]
        begin = end


def _smallest(vocabulary: int) -> type[np.integer[Any]]:
    return np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32
