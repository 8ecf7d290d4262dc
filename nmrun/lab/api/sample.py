"""``nmrun sample RUN``: a prompt and the text that a trained language model continues it with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError, RunError
from nmrun.lab import verbs
from nmrun.lab.runs.run_folder import RESULT
from nmrun.lab.verbs import Parser

if TYPE_CHECKING:
    from torch import nn


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="nmrun sample", description="Let a trained language model continue a prompt."
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run")
    add("--prompt", default="\n", metavar="TEXT", help="what is continued (default: a line break)")
    add("--tokens", type=int, default=200, metavar="T", help="how many follow (default: 200)")
    text = "1: as probable as the model has them (default); below: likely ones more often; 0: the likeliest"
    add("--temperature", type=float, default=1.0, metavar="T", help=text)
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest (default: all)")
    add("--seed", type=int, default=0, help="seed of the choices (default: 0)")
    verbs.consent_option(parser)
    options, rest = parser.parse_known_args(argv)
    if rest:
        hint = "" if rest[0].startswith("-") else " (the text to continue is --prompt TEXT)"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if options.tokens < 1:
        parser.error(f"--tokens {options.tokens}: a whole number, 1 or more")
    if not 0 <= options.temperature < float("inf"):
        parser.error(f"--temperature {options.temperature:g}: a number, 0 or more")
    if options.top_k is not None and options.top_k < 1:
        parser.error(f"--top-k {options.top_k}: a whole number, 1 or more")
    try:
        options.prompt.encode()
    except UnicodeEncodeError:
        parser.error("--prompt: it is not UTF-8")
    if not 0 <= options.seed < 1 << 63:
        parser.error(f"--seed {options.seed}: a whole number, 0 or more, below 2**63")
    if not (options.run / RESULT).is_file():
        raise ConfigError(f"{options.run} holds no finished run: there is no {RESULT}")
    from nmrun.lab.export import finished_run  # torch
    from nmrun.lab.tasks.text.language import LanguageModelling

    try:
        run = finished_run.read(options.run, options.yes)
        model, task = finished_run.network(run)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        raise RunError(str(error)) from None
    name = run.result["config"]["dataset"]["name"]
    if not isinstance(task, LanguageModelling):
        raise ConfigError(f"{options.run}: dataset={name} is no text to continue")
    if task.vocabulary_of is None:
        raise ConfigError(
            f"{options.run}: dataset={name} has token numbers alone, and no vocabulary to write them by"
        )
    vocabulary = task.vocabulary_of()
    tokens = vocabulary.encode(options.prompt)
    if not tokens:
        raise ConfigError("--prompt: it has no token; a model continues at least one")
    window, vocabulary_size = task.context, task.vocabulary
    choices = (options.temperature, options.top_k, options.seed)
    print(
        vocabulary.decode(
            tokens + continued(model, tokens, options.tokens, window, vocabulary_size, *choices)
        )
    )
    return 0


def continued(
    model: nn.Module,
    tokens: Sequence[int],
    count: int,
    window: int,
    vocabulary_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Draw ``count`` tokens that follow some, from a model of tokens (1, T) to logits (1, T,
    vocabulary) that sees ``window`` of them.

    ``vocabulary_size`` counts the tokens of the data; a network may have logits of more. A
    ``temperature`` of 0 takes the largest logit. RunError for logits that are not finite.
    """
    import torch

    random, sequence = torch.Generator().manual_seed(seed), list(tokens)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([sequence[-window:]]))[0, -1, :vocabulary_size].double()
            if not logits.isfinite().all():
                raise RunError("the model's logits are not finite")
            if temperature == 0:
                sequence.append(int(logits.argmax()))
                continue
            best, indices = logits.topk(min(top_k or vocabulary_size, vocabulary_size))
            likely = ((best - best[0]) / temperature).softmax(0)
            sequence.append(int(indices[torch.multinomial(likely, 1, generator=random)]))
    return sequence[len(tokens) :]
