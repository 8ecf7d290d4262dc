"""Turns texts into arrays of token numbers: by bytes, characters, words, or a tokenizer of Hugging
Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    decoded = _decoded(texts)
    if tokenizer not in LEVELS:
        return _by_hugging_face(decoded, tokenizer)
    numbers = _numbers(decoded, tokenizer)
    kind = _smallest(len(numbers))
    arrays = {
        name: np.fromiter((_known(numbers, piece) for piece in _pieces(text, tokenizer)), kind)
        for name, text in decoded.items()
    }
    return arrays, len(numbers)


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
    known = _numbers(_decoded(read()), tokenizer)
    tokens = list(known)
    if tokenizer == "character":
        return Codec(
            lambda text: [_known(known, letter) for letter in text],
            lambda numbers: "".join(tokens[number] for number in numbers),
        )
    return Codec(
        lambda text: [_known(known, word) for word in text.replace("\n", f" {END} ").split()],
        lambda numbers: " ".join(tokens[number] for number in numbers).replace(f" {END} ", "\n"),
    )


def _numbers(texts: Mapping[str, str], level: str) -> dict[str, int]:
    """The number of each letter of the texts, or of each word of the training text."""
    words = _pieces(texts["train"], level)
    tokens = dict.fromkeys(words) if level == "word" else sorted(set().union(*texts.values()))
    return {token: number for number, token in enumerate(tokens)}


def _known(numbers: Mapping[str, int], token: str) -> int:
    number = numbers.get(token, numbers.get(UNKNOWN))
    if number is None:
        raise ConfigError(f"{token!r} is not in the vocabulary of the training text")
    return number


def _pieces(text: str, level: str) -> Iterable[str]:
    """The letters of a text, or its words."""
    if level == "character":
        return text
    lines = text.removesuffix("\n").split("\n")
    return (word for line in lines for word in (*line.split(), END))


def _decoded(texts: Mapping[str, bytes]) -> dict[str, str]:
    with refused("a text is not UTF-8 (dataset.tokenizer=byte takes any): ", UnicodeDecodeError):
        return {name: text.decode() for name, text in texts.items()}


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


def _by_hugging_face(texts: Mapping[str, str], name: str) -> Encoded:
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
