"""What ``nmrun bench`` can be asked for: its networks, arms and options, and what is wrong with them,
without an import of torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError
from nmrun.lab.arguments import Parser, files_of_the_command, in_range
from nmrun.lab.config import command_line, composition, precheck
from nmrun.lab.config.schema import no_gpu
from nmrun.lab.keys.config import Config
from nmrun.lab.keys.options import names
from nmrun.patterns import Pattern
from nmrun.ranges import Check, whole

if TYPE_CHECKING:
    import torch

    from nmrun.lab.tasks.vision import Classification

# --- the networks, with random data ---------------------------------------------------------------

GPT = ("dataset=token_bin", "dataset.vocabulary=50304")
IMAGES = ("dataset=digits", "+dataset._target_=nmrun.lab.bench.options.random_images")
NETWORKS: dict[str, tuple[str, ...]] = {
    "gpt_tiny": (
        *GPT, "dataset.vocabulary=256", "dataset.context=64", "model=gpt_tiny", "trainer.batch_size=16",
    ),
    "gpt_512": (
        *GPT, "dataset.vocabulary=256", "dataset.context=128", "model=gpt2", "model.layers=6",
        "model.width=512", "model.heads=8", "trainer.batch_size=8",
    ),
    "gpt2": (*GPT, "model=gpt2", "trainer.batch_size=16"),
    # two blocks as wide as those of language models of 7 thousand million parameters
    "gpt_4096": (
        *GPT, "dataset.vocabulary=8192", "dataset.context=2048", "model=gpt2", "model.layers=2",
        "model.width=4096", "model.heads=32", "trainer.batch_size=4",
    ),
    "vit_large": (
        *IMAGES, "+dataset.side=224", "model=vit_base", "model.heads=16", "model.layers=24",
        "model.width=1024", "trainer.batch_size=64",
    ),
    "resnet18": (*IMAGES, "+dataset.side=32", "model=resnet18", "trainer.batch_size=64"),
}  # fmt: skip
COMMON = ("optimizer=adamw", "track=local", "trainer.clip=1")
# those of infer: encoders, by layers, width and heads; networks for images, by their sides
ENCODERS = {
    "transformer": (6, 512, 8),
    "bert_base": (12, 768, 12),
    "bert_large": (24, 1024, 16),
    "tiny": (1, 64, 2),
}
IMAGE_SIDES = {"resnet18": 32, "vit_large": 224}


def composed(folder: Path, words: Sequence[str]) -> Config:
    """The config of a run that is measured; ``folder`` has its data and results."""
    return composition.config_of(_overrides(folder, words))


def _overrides(folder: Path, words: Sequence[str]) -> list[str]:
    data = [f"dataset.folder={folder}"] if "dataset=token_bin" in words else []
    return [*COMMON, *words, *data, f"output_dir={folder}"]


def random_images(config: Config, device: torch.device) -> Classification:
    """A data set for ``dataset._target_``: random images of ``dataset.side`` pixels a side in 1,000
    classes."""
    import torch

    from nmrun.lab.tasks.vision import Classification

    side, count = config.dataset.values()["side"], 4 * config.trainer.batch_size
    images = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, device=device)
    labels = torch.randint(1000, (count,), device=device)
    splits = dict.fromkeys(("train", "val", "test"), (images, labels))
    return Classification.of(config, splits, 1000, device)


def random_text(folder: Path) -> None:
    """Files for ``dataset=token_bin`` of a million random tokens, below 256 so that each vocabulary
    has them."""
    import numpy as np

    for name in ("train", "val"):
        tokens = np.random.default_rng(0).integers(256, size=1 << 20)
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")


# --- the options ----------------------------------------------------------------------------------

PRECISIONS = ("float32", "bf16", "int8")
# of infer, those that are ready sooner first
ARMS = ("torch", "packed", "openvino", "compiled", "packed_compiled")
PLAIN_LOOPS = ("plain_loop", "masked_loop")  # of train, beside recipes

positive = in_range(int, whole(1))
pattern = in_range(Pattern.parse, Check("N:M with 1 <= N <= M, such as 2:4", lambda _: True))
sequences = in_range(  # and the tokens of each
    lambda text: tuple(map(int, (text if "x" in text else f"1x{text}").split("x"))),
    Check(
        "a whole number, or two such as 8x128",
        lambda sides: len(sides) == 2 and all(map(whole(1).holds, sides)),
    ),
)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """The options by name, and ``what`` is measured; the folder of the results is made.

    ConfigError for a mistake, as far as it shows before torch is imported.
    """
    words = [word for word in argv if "=" in word and word[:1] != "-"]
    options = _parser().parse_args([word for word in argv if word not in words])
    if options.what == "train":
        composition.register()
        options.overrides = words
        for override in command_line.parsed(words)[0]:
            if override.key_or_group in ("dataset", "model"):
                raise ConfigError(f"{override.input_line}: --models chooses networks and data")
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: it takes one value")
        sweeps = [
            _overrides(Path(), [*NETWORKS[model], *words, f"sparsity='{ratio}'"])
            for model in options.models
            for ratio in options.sparsity
        ]
        precheck.read(sweeps)
        # one that cannot have a ratio is left out of the comparison
        if recipes := [arm for arm in options.arms if arm not in PLAIN_LOOPS]:
            asked = [*NETWORKS[options.models[0]], f"recipe={','.join(recipes)}"]
            precheck.read([_overrides(Path(), asked)], multirun=True)
    elif words:
        raise ConfigError(f"{words[0]}: nmrun bench infer takes no overrides")
    elif options.device == "cuda" and no_gpu():
        raise ConfigError("--device cuda: torch sees no CUDA device here")
    if options.out:
        with files_of_the_command():
            options.out.mkdir(parents=True, exist_ok=True)
    return vars(options)


def _parser() -> Parser:
    parser = Parser(prog="nmrun bench", description="How fast this machine trains and infers.")
    parsers = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    both = Parser(add_help=False)
    text = "measurements of each (default: 10)"
    both.add_argument("--rounds", type=positive, default=10, help=text)
    text = "write the results there, as .md and .json"
    both.add_argument("--out", type=Path, metavar="DIR", help=text)

    text = "Training steps of recipes and of plain loops, beside dense ones"
    train = parsers.add_parser("train", parents=[both], help=text, description=f"{text}.")
    several: dict[str, Any] = {"nargs": "+"}
    text = "default: gpt_tiny"
    train.add_argument("--models", **several, choices=NETWORKS, default=["gpt_tiny"], help=text)
    text = "default: 2:4"
    train.add_argument(
        "--sparsity", **several, type=pattern, metavar="N:M", default=[Pattern(2, 4)], help=text
    )
    arms = [*PLAIN_LOOPS, *(name for name in names("recipe") if name not in ("dense", "custom"))]
    text = f"recipes, {' and '.join(PLAIN_LOOPS)} (default: all of them)"
    train.add_argument("--arms", **several, metavar="NAME", default=arms, help=text)
    text = "steps of a measurement (default: 1)"
    train.add_argument("--steps", type=positive, default=1, help=text)
    train.epilog = "key=value anywhere is for all arms, such as trainer.compile=true."

    text = "Forward passes of networks, dense and packed"
    infer = parsers.add_parser("infer", parents=[both], help=text, description=f"{text}.")
    text, networks = "default: transformer", (*ENCODERS, *IMAGE_SIDES)
    infer.add_argument("--models", **several, choices=networks, default=["transformer"], help=text)
    text, ratios = "default: 2:4 1:8", [Pattern(2, 4), Pattern(1, 8)]
    infer.add_argument(
        "--sparsity", **several, type=pattern, metavar="N:M", default=ratios, help=text
    )
    text = "tokens of a sequence, or sequences x tokens; images (default: 128)"
    infer.add_argument(
        "--tokens", **several, type=sequences, metavar="N", default=[(1, 128)], help=text
    )
    text = "default: those of this processor; on a GPU bf16"
    infer.add_argument("--precisions", **several, choices=PRECISIONS, help=text)
    text = f"default: all but {ARMS[-1]}; torch is always there"
    infer.add_argument("--arms", **several, choices=ARMS, default=ARMS[:-1], help=text)
    text = "default: a GPU where there is one"
    infer.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)
    text = "of the CPU (default: as many as torch takes)"
    infer.add_argument("--threads", type=positive, help=text)
    return parser
