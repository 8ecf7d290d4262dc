"""``nmrun prepare``: raw parallel text into subwords and fairseq's binary files."""

from __future__ import annotations

import argparse
from pathlib import Path

from nmrun.errors import ConfigError
from nmrun.lab.verbs import Parser


def prepare(argv: list[str]) -> int:
    """Run ``nmrun prepare`` with these words; returns the exit status."""
    parser = Parser(
        "nmrun prepare",
        description="Raw parallel text into subwords and fairseq's binary files, for dataset=fairseq (or fairseq-train).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "corpus",
        choices=["multi30k", "parallel"],
        help="Multi30k below NMRUN_DATA, or any line-by-line text",
    )
    parser.add_argument(
        "--to", type=Path, required=True, help="the folder to write; it must not be there yet"
    )
    parser.add_argument(
        "--source", default="de", help="language that is translated from: the ending of its files"
    )
    parser.add_argument("--target", default="en", help="language that is translated into")
    for split in ("train", "valid", "test"):
        parser.add_argument(
            f"--{split}",
            type=Path,
            help=f"parallel: {split} text without .<language> or .<language>.gz",
        )
    parser.add_argument("--vocabulary", type=int, default=8000, help="subwords of BPE")
    parser.add_argument(
        "--separate",
        action="store_true",
        help="a BPE and a dictionary for each language, not one for both",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=250,
        help="training pairs with more subwords on a side are left out",
    )
    asked = parser.parse_args(argv)
    languages = asked.source, asked.target
    if asked.corpus == "parallel":
        given = {split: getattr(asked, split) for split in ("train", "valid", "test")}
        if missing := [f"--{split}" for split, prefix in given.items() if prefix is None]:
            raise ConfigError(
                f"prepare parallel: {', '.join(missing)} missing: the text without its .{asked.source} and .{asked.target}"
            )
    if asked.to.exists():
        raise ConfigError(f"--to {asked.to}: it is there already")
    from nmrun.papers.translation.multi30k import files  # torch
    from nmrun.papers.translation.prepare import beside
    from nmrun.papers.translation.prepare import prepare as prepare_texts

    if asked.corpus == "multi30k":
        texts = files(languages, "test_2016_flickr")
    else:
        texts = {
            split: (beside(prefix, asked.source), beside(prefix, asked.target))
            for split, prefix in given.items()
        }
    said = prepare_texts(
        texts,
        languages,
        asked.to,
        asked.vocabulary,
        joint=not asked.separate,
        longest=asked.longest,
    )
    print(
        f"{said}\n  nmrun dataset=fairseq dataset.path={asked.to} dataset.subwords=sentencepiece model=fairseq_transformer"
    )
    return 0
