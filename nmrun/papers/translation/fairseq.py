"""fairseq without the traces of its import, and its Transformer in its usual sizes."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from hydra.core.config_store import ConfigStore

from nmrun.errors import needs, refused

if TYPE_CHECKING:
    from nmrun.papers.translation.fairseq_modules import TranslationTransformer


class Dictionary(Protocol):
    """The tokens of a language; ``fairseq.data.Dictionary`` is one. Token i is ``symbols[i]``."""

    symbols: list[str]

    def add_symbol(self, word: str) -> int: ...
    def pad(self) -> int: ...
    def eos(self) -> int: ...
    def unk(self) -> int: ...
    def __len__(self) -> int: ...


def fairseq(module: str) -> Any:
    """A module of fairseq such as ``data``, or one of nmrun that imports fairseq, by its whole
    name. Raises ConfigError if fairseq is not installed.
    """
    name = module if module.startswith("nmrun.") else f"fairseq.{module}"
    with needs("translation", "translation"), undisturbed():
        return importlib.import_module(name)


def dictionary(words: Iterable[str]) -> Dictionary:
    """These words after fairseq's four marks."""
    made: Dictionary = fairseq("data").Dictionary()
    for word in words:
        made.add_symbol(word)
    return made


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep Hydra's ConfigStore, the root logger and the filters of warnings; log nothing."""
    store, root = ConfigStore.instance(), logging.getLogger()
    state = copy.deepcopy(store.repo), root.level, list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        store.repo, root.level, root.handlers[:], root.manager.disable = state
        root.manager._clear_cache()  # type: ignore[attr-defined]  # of which loggers are enabled, which depends on the level


def transformer(
    source: Dictionary,
    target: Dictionary,
    width: int,
    ffn: int,
    layers: int,
    heads: int,
    dropout: float,
    attention_dropout: float,
    activation_dropout: float,
    share_embeddings: str,
) -> TranslationTransformer:
    """A Transformer between two dictionaries; parameters have fairseq's names.

    ``share_embeddings`` is ``decoder`` (its input and output), ``all`` (the encoder's too),
    ``none``, or ``auto``: all where both languages have one dictionary, else decoder. Raises
    ConfigError if fairseq is not installed, or takes no such sizes or sharing.
    """
    joint = source == target
    modules = fairseq("nmrun.papers.translation.fairseq_modules")
    config = modules.TransformerConfig.from_namespace(
        Namespace(
            **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in [
                ("embed_dim", width), ("ffn_embed_dim", ffn), ("layers", layers), ("attention_heads", heads),
            ]},
            decoder_input_dim=width,
            decoder_output_dim=width,
            dropout=dropout,
            attention_dropout=attention_dropout,
            activation_dropout=activation_dropout,
            share_all_embeddings=share_embeddings == "all" or (share_embeddings == "auto" and joint),
            share_decoder_input_output_embed=share_embeddings in ("auto", "decoder", "all"),
        )
    )  # fmt: skip
    with refused("model: ", AssertionError, ValueError):
        model: TranslationTransformer = modules.TranslationTransformer.build_model(
            config, Namespace(source_dictionary=source, target_dictionary=target)
        )
    return model
