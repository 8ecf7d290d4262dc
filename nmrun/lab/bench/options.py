"""The options of ``nmrun bench WHAT``, and what is wrong with them, without an import of torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError
from nmrun.lab.bench import BENCHMARKS
from nmrun.lab.bench.networks import NETWORKS, overrides
from nmrun.lab.verbs import Parser
from nmrun.lab.words import composition, precheck
from nmrun.lab.words.rules import no_gpu
from nmrun.patterns import Pattern, PatternError

COLUMNS = 4096  # inputs of the layer of masks; the number of weights decides on the outputs
# of recipes: recipes.WORKLOADS and recipes.ARMS
WORKLOADS = ("small_conv", "resnet18", "transformer", "tiny")
RECIPES = (
    "dense_again", "asp", "ste", "sr_ste", "step_phase_one", "step_phase_two", "s_ste", "mdgf_linear", "mdgf_exponential",
    "sdgf_stepwise", "sdgf_geometric", "t_sr_ste", "t_sr_ste_search", "bi_mask", "bi_mask_search", "lbc", "maskllm",
    "slope", "ast", "cast", "proxsparse", "sqft", "sr_ste_argsort",
)  # fmt: skip
# of masks: what writes into a tensor that is there (masks.ARMS), what makes one (masks.FUNCTIONS)
ARMS = ("nmrun", "reference", "topk", "argsort")
FUNCTIONS = ("nm_mask", "nm_mask dim 0", "flip_rate", "kept_energy")
DTYPES = ("float32", "bfloat16", "float16")
RATIOS = ("2:4", "1:4", "2:8", "1:16", "8:32", "16:32")
# of update
UPDATED = (
    "asp", "ste", "sr_ste", "step_phase_two", "s_ste", "mdgf_linear", "sdgf_stepwise", "t_sr_ste", "bi_mask",
)  # fmt: skip
# of gemm, by the kind of device
GEMM_SHAPES = {
    "cuda": ("768x3072", "1024x4096", "1280x5120", "1600x6400", "2048x8192", "4096x16384"),
    "cpu": ("512x2048", "1024x4096"),
}
GEMM_TOKENS = {"cuda": (1024, 2048, 4096, 8192, 16384, 32768), "cpu": (64, 512, 1024)}
CPU_RATIOS = ("2:4", "1:4", "1:8", "1:16")  # of gemm and infer
# of layer
LAYER_SHAPES = {
    "cuda": ("768x3072", "3072x768", "1600x6400", "6400x1600", "4096x16384", "16384x4096"),
    "cpu": ("256x1024",),
}
LAYER_TOKENS = {"cuda": 8192, "cpu": 512}
# of train
TRAINED = {
    "cuda": ("gpt2", "gpt2_medium", "gpt2_large", "vit_large", "vit_huge"),
    "cpu": ("gpt_tiny", "vit_small_32"),
}
TRAINING_ARMS = ("dense", "torch", "masked", "accelerated", "bare")
# of infer (infer.network)
INFERRED_NETWORKS = (
    "transformer", "bert_base", "bert_large", "tiny", "resnet18", "vit_large",
    *(f"{name}{kind}" for name in ("gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "llama_7b_block") for kind in ("", "_prompt")),
)  # fmt: skip
INFERRING = (
    "torch", "compiled", "onednn", "onnxruntime", "openvino", "packed", "packed_compiled",
)  # fmt: skip
INFERRING_ON_GPU = ("torch", "compiled", "packed", "packed_compiled")
PRECISIONS = ("float32", "bf16", "int8")
# by the kind of device
INFERRED = {"cuda": ("bert_large", "gpt2_prompt"), "cpu": ("transformer", "bert_base")}
INFERRED_RATIOS = {"cuda": ("2:4",), "cpu": CPU_RATIOS}
INFERRED_TOKENS = {"cuda": ("512", "8x512", "32x512"), "cpu": ("1", "128", "8x128")}


def parse(what: str, argv: Sequence[str]) -> dict[str, Any]:
    """The options of a benchmark by name; the folder of its results is made.

    ConfigError for a mistake, as far as it shows before torch is imported.
    """
    parser = PARSERS[what]()
    options = parser.parse_args(argv)
    if getattr(options, "device", None) == "cuda" and no_gpu():
        parser.error("--device cuda: torch sees no CUDA device here")
    if what == "train":
        names = options.models or TRAINED["cpu" if options.device == "cpu" or no_gpu() else "cuda"]
        for ratio in options.sparsity:
            sparse = [f"recipe={options.recipe}", f"sparsity='{ratio}'"]
            _check(names, [*sparse, *options.overrides])
    if options.out:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {options.out}: {error.strerror}")
    return vars(options)


def _check(names: Sequence[str], words: Sequence[str]) -> None:
    composition.register()
    for name in names:
        if problems := precheck.look(overrides(Path(), [*NETWORKS[name], *words])).problems:
            raise ConfigError(problems)


# --- what a word may be ---------------------------------------------------------------------------


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number, 1 or more")
    return int(text)


def pattern(text: str) -> Pattern:
    """N:M, for argparse."""
    try:
        if (parsed := Pattern.parse(text)).v == 1:
            return parsed
    except PatternError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    raise argparse.ArgumentTypeError(f"{text}: kernels are timed with N:M, such as 2:8")


def narrow(text: str) -> Pattern:
    """An N:M whose groups fit into a row of ``masks``, for argparse."""
    parsed = pattern(text)
    if parsed.m > COLUMNS:
        raise argparse.ArgumentTypeError(f"{text}: M up to {COLUMNS}")
    return parsed


def size(text: str) -> float:
    """Millions of weights, for argparse."""
    try:
        if 0 < (value := float(text)) <= 10_000:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: millions of weights, up to 10000")


def shape(text: str) -> tuple[int, int]:
    """``768x3072``, inputs and outputs of a layer, for argparse."""
    sides = text.split("x")
    if len(sides) != 2 or not all(
        side.isdecimal() and int(side) > 0 and int(side) % 16 == 0 for side in sides
    ):
        raise argparse.ArgumentTypeError(
            f"{text}: inputs x outputs, multiples of 16, such as 768x3072"
        )
    return int(sides[0]), int(sides[1])


def sequences(text: str) -> tuple[int, int]:
    """``128`` or ``8x128``, sequences and their tokens, for argparse."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: a whole number, or two such as 8x128")
    return int(sides[0]) if len(sides) > 1 else 1, int(sides[-1])


# --- the parsers ----------------------------------------------------------------------------------


def _parser(name: str, rounds: int) -> Parser:
    """What all benchmarks take: rounds, device and where the results go."""
    parser = Parser(
        prog=f"nmrun bench {name}",
        description=BENCHMARKS[name][:1].upper() + BENCHMARKS[name][1:] + ".",
    )
    add = parser.add_argument
    add("--rounds", type=positive, default=rounds, help=f"measurements of each (default: {rounds})")
    add("--out", type=Path, metavar="DIR", help="write the results there, as .md and .json")
    if name != "recipes":
        choices = ("auto", "cpu", "cuda")
        add("--device", choices=choices, default="auto", help="default: a GPU where there is one")
    return parser


def _add_list(parser: Parser, flag: str, default: Sequence[object], **how: object) -> None:
    """An option of several values, whose help says its default."""
    text = f"default: {' '.join(map(str, default))}"
    parser.add_argument(flag, nargs="+", default=[*default], **{"help": text, **how})  # type: ignore[arg-type]


def _usual(by_device: Mapping[str, Sequence[object]]) -> str:
    """What stands for an option that nobody gives, in words."""
    on_gpu, on_cpu = (" ".join(map(str, by_device[kind])) for kind in ("cuda", "cpu"))
    return f"default: {on_gpu}; on a CPU {on_cpu}"


def _recipes() -> Parser:
    parser = _parser("recipes", 20)
    # tiny tries the benchmark itself
    _add_list(parser, "--models", WORKLOADS[:-1], choices=WORKLOADS)
    _add_list(parser, "--sparsity", [Pattern(2, 4), Pattern(1, 16)], type=pattern, metavar="N:M")
    _add_list(parser, "--recipes", RECIPES, choices=RECIPES, help="default: all of them")
    return parser


def _masks() -> Parser:
    parser, every = _parser("masks", 10), (*ARMS, *FUNCTIONS)
    _add_list(parser, "--sparsity", [*map(narrow, RATIOS)], type=narrow, metavar="N:M")
    _add_list(parser, "--weights", [1, 10, 50], type=size, metavar="MILLIONS")
    _add_list(parser, "--arms", every, choices=every, help="default: all of them")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32")
    return parser


def _update() -> Parser:
    parser = _parser("update", 20)
    _add_list(parser, "--sparsity", [Pattern(2, 4)], type=narrow, metavar="N:M")
    text = "default: 28, GPT-2's feed-forward layers of six blocks"
    parser.add_argument("--weights", type=size, default=28, metavar="MILLIONS", help=text)
    _add_list(parser, "--recipes", UPDATED, choices=UPDATED, help="default: all of them")
    return parser


def _gemm() -> Parser:
    parser = _parser("gemm", 20)
    for flag, kind, usual in (
        ("--shapes", shape, GEMM_SHAPES),
        ("--tokens", positive, GEMM_TOKENS),
    ):
        metavar = "INxOUT" if kind is shape else None
        parser.add_argument(flag, nargs="+", type=kind, metavar=metavar, help=_usual(usual))
    parser.add_argument("--fp8", action="store_true", help="products of FP8 operands")
    text = f"on a CPU (default: {' '.join(CPU_RATIOS)}); on a GPU it is 2:4"
    parser.add_argument("--sparsity", nargs="+", type=pattern, metavar="N:M", help=text)
    return parser


def _layer() -> Parser:
    parser = _parser("layer", 20)
    text = f"default: {' '.join(LAYER_SHAPES['cuda'])}"
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="INxOUT", help=text)
    text = "of a micro-batch (default: {cuda}, on a CPU {cpu})".format(**LAYER_TOKENS)
    parser.add_argument("--tokens", type=positive, help=text)
    _add_list(
        parser, "--accumulate", [1, 4], type=positive, help="micro-batches a step (default: 1 4)"
    )
    return parser


def _train() -> Parser:
    parser = _parser("train", 10)
    parser.add_argument("--models", nargs="+", choices=NETWORKS, help=_usual(TRAINED))
    parser.add_argument("--recipe", default="sr_ste", help="default: sr_ste")
    text = "each measured by itself, beside dense (default: 2:4)"
    _add_list(parser, "--sparsity", ["2:4"], metavar="N:M", help=text)
    text = "default: all of them, torch on a CPU alone; dense is always there"
    parser.add_argument("--arms", nargs="+", choices=TRAINING_ARMS, help=text)
    text = "steps of a stretch (default: 10)"
    parser.add_argument("--steps", type=positive, default=10, help=text)
    text = "torch.compile all arms (default: on a GPU)"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=text)
    _overrides(parser, "trainer.batch_size=32")
    return parser


def _infer() -> Parser:
    parser = _parser("infer", 12)
    add, names = parser.add_argument, ", ".join(INFERRED_NETWORKS)
    text = f"{names} ({_usual(INFERRED)})"
    add("--models", nargs="+", choices=INFERRED_NETWORKS, metavar="NAME", help=text)
    text = _usual(INFERRED_RATIOS)
    add("--sparsity", nargs="+", type=pattern, metavar="N:M", help=text)
    text = (
        "of a sequence, or sequences x tokens; for language models sequences, with one new token each "
        f"(NAME_prompt: of a prompt); for resnet18 and vit_large images ({_usual(INFERRED_TOKENS)})"
    )
    add("--tokens", nargs="+", type=sequences, metavar="N", help=text)
    text = "default: those that this processor has; on a GPU it is bf16"
    add("--precisions", nargs="+", choices=PRECISIONS, help=text)
    text = "default: all; on a CPU all but packed_compiled, those of runtimes where these are installed"
    add("--arms", nargs="+", choices=INFERRING, help=text)
    add("--threads", type=positive, help="of the CPU (default: as many as torch takes)")
    return parser


def _overrides(parser: Parser, example: str) -> None:
    text = f"for all arms, such as {example}"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)


PARSERS = {
    "recipes": _recipes,
    "masks": _masks,
    "update": _update,
    "gemm": _gemm,
    "layer": _layer,
    "train": _train,
    "infer": _infer,
}
