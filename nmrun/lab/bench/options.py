"""The options of ``nmrun bench``, and what is wrong with them, without an import of torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError
from nmrun.lab.arguments import Parser, files_of_the_command, in_range
from nmrun.lab.bench.networks import INFERRED, NETWORKS, overrides
from nmrun.lab.config import composition, precheck
from nmrun.lab.config.schema import no_gpu
from nmrun.lab.keys.options import names
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import Check, whole

PRECISIONS = ("float32", "bf16", "int8")
# of infer, those that are ready sooner first
ARMS = ("torch", "packed", "openvino", "compiled", "packed_compiled")
PLAIN_LOOPS = ("plain_loop", "masked_loop")  # of train, beside recipes


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """The options by name, and ``what`` is measured; the folder of the results is made.

    ConfigError for a mistake, as far as it shows before torch is imported.
    """
    words = [word for word in argv if "=" in word and word[:1] != "-"]
    options = _parser().parse_args([word for word in argv if word not in words])
    if options.what == "train":
        options.overrides = words
        for ratio in options.sparsity:
            _check(options.models, [*words, f"sparsity='{ratio}'"])
        if recipes := [arm for arm in options.arms if arm not in PLAIN_LOOPS]:
            _check(options.models[:1], [f"recipe={','.join(recipes)}"], multirun=True)
    elif words:
        raise ConfigError(f"{words[0]}: nmrun bench infer takes no overrides")
    elif options.device == "cuda" and no_gpu():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    if options.out:
        with files_of_the_command():
            options.out.mkdir(parents=True, exist_ok=True)
    return vars(options)


def _check(models: Sequence[str], words: Sequence[str], multirun: bool = False) -> None:
    composition.register()
    for model in models:
        precheck.read([overrides(Path(), [*NETWORKS[model], *words])], multirun)


def _parser() -> Parser:
    parser = Parser(prog="nmrun bench", description="How fast this machine trains and infers.")
    parsers = parser.add_subparsers(dest="what", required=True, metavar="WHAT")

    def of(what: str, about: str) -> Parser:
        one: Parser = parsers.add_parser(what, help=about, description=f"{about}.")
        text = "measurements of each (default: 10)"
        one.add_argument("--rounds", type=positive, default=10, help=text)
        text = "write the results there, as .md and .json"
        one.add_argument("--out", type=Path, metavar="DIR", help=text)
        return one

    recipes = [name for name in names("recipe") if name not in ("dense", "custom")]
    train = of("train", "Training steps of recipes and of plain loops, beside dense ones")
    _list(train, "--models", ["gpt_tiny"], choices=NETWORKS)
    _list(train, "--sparsity", ["2:4"], metavar="N:M")
    text = f"recipes, {' and '.join(PLAIN_LOOPS)} (default: all of them)"
    _list(train, "--arms", [*PLAIN_LOOPS, *recipes], metavar="NAME", help=text)
    text = "steps of a measurement (default: 1)"
    train.add_argument("--steps", type=positive, default=1, help=text)
    train.epilog = "key=value anywhere is for all arms, such as trainer.compile=true."

    infer = of("infer", "Forward passes of networks, dense and packed")
    _list(infer, "--models", ["transformer"], choices=INFERRED)
    text = "default: 2:4 1:8, on a GPU 2:4"
    infer.add_argument("--sparsity", nargs="+", type=pattern, metavar="N:M", help=text)
    text = "tokens of a sequence, or sequences x tokens; images (default: 128)"
    _list(infer, "--tokens", [(1, 128)], type=sequences, metavar="N", help=text)
    text = "default: those of this processor; on a GPU bf16"
    infer.add_argument("--precisions", nargs="+", choices=PRECISIONS, help=text)
    text = f"default: all but {ARMS[-1]}; torch is always there"
    _list(infer, "--arms", ARMS[:-1], choices=ARMS, help=text)
    text = "default: a GPU where there is one"
    infer.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = "of the CPU (default: as many as torch takes)"
    infer.add_argument("--threads", type=positive, help=text)
    return parser


def _list(parser: Parser, flag: str, default: Sequence[object], **how: Any) -> None:
    """An option of several values, whose help says its default."""
    text = f"default: {' '.join(map(str, default))}"
    parser.add_argument(flag, nargs="+", default=[*default], **{"help": text, **how})


positive = in_range(int, whole(1))


def pattern(text: str) -> Pattern:
    """N:M, for argparse."""
    try:
        return Pattern.parse(text)
    except PatternError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


sequences = in_range(  # and the tokens of each
    lambda text: tuple(map(int, (text if "x" in text else f"1x{text}").split("x"))),
    Check(
        "a whole number, or two such as 8x128",
        lambda sides: len(sides) == 2 and all(map(whole(1).holds, sides)),
    ),
)
