"""``nmrun tune NAME [--trials N] [--over KEY=RANGE] [overrides]``: a comparison of tuned recipes, with
the same number of trials for each."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nmrun.errors import ConfigError
from nmrun.lab.arguments import Parser, files_of_the_command, in_range
from nmrun.lab.output import quantity
from nmrun.ranges import whole

FOLDER = ".tune"  # in the output folder; the runs of the trials are below it


def main(argv: Sequence[str]) -> int:
    """Tune every cell of a sweep by the same number of trials, then run its seeds, and print the
    table.

    Given again, it goes on; given in several processes at once, each takes cells that nobody is at
    work on. With ``dry=true`` it prints what it would do, and writes nothing. Returns 1 where all
    trials of a cell failed, or a run of a seed.
    """
    parser = Parser(
        prog="nmrun tune",
        description="Tune every recipe of a sweep with the same number of trials, by the validation split. Then run the seeds with the "
        "best settings, and print the table. Trials vary the learning rate and the recipe's own hyperparameters.",
    )
    parser.add_argument("name", help="of the comparison; its folder is OUTPUT_DIR/.tune/NAME")
    parser.add_argument(
        "words", nargs="+", metavar="SWEEP", help="a sweep, as after nmrun -m, with its seeds"
    )
    parser.add_argument(
        "--trials",
        type=in_range(int, whole(1)),
        default=8,
        help="of each recipe at each ratio (default 8)",
    )
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="KEY=RANGE",
        help="look for KEY in another range than the recipe's own, as in 'optimizer.lr=tag(log,interval(1e-4,1e-2))' or "
        "recipe.switch=auto,0.2,0.5; recipes without the key are left as they are",
    )
    parser.add_argument("--config-dir", help="a folder of more configs")
    options = parser.parse_intermixed_args(argv)
    if "=" in options.name or "/" in options.name or options.name.startswith("."):
        raise ConfigError(f"{options.name}: the first word is a name for the comparison")
    from nmrun.lab.config import composition
    from nmrun.lab.sweeps import jobs
    from nmrun.lab.tune import plan
    from nmrun.lab.tune.study import AGAIN, SEED, import_optuna

    space = plan.read_space(options.over)
    words = composition.options(list(options.words)).overrides
    asked = jobs.checked(words, multirun=True, config_dir=options.config_dir)
    if taken := {SEED, *AGAIN} & {job.config.seed for job in asked.jobs}:
        raise ConfigError(f"seed={min(taken)}: the seeds {SEED} to {AGAIN[-1]} are those of tuning")
    if asked.launcher != "basic":
        raise ConfigError(
            f"launcher={asked.launcher}: nmrun tune launches nothing; give the same command in "
            "several processes, of which each takes cells that no other is at"
        )
    folder = Path(asked.output_dir, FOLDER, options.name).absolute()
    every = plan.cells(folder, asked.jobs, space, options.config_dir)
    if asked.dry:
        print("\n".join([*plan.summary(every, options.trials), f"  {folder}"]))
        return 0
    import_optuna()  # before anything is written
    from nmrun.lab.tune import comparison  # torch

    with files_of_the_command():
        comparison.check_names(folder, every)
        for cell in every:
            comparison.check(cell)
    seeds = max(len(cell.seeds) for cell in every)
    counts = {"cell": len(every), "trial": options.trials, "seed": seeds}
    of_cells, *of_each = (quantity(count, noun) for noun, count in counts.items())
    print(f"{of_cells}, {' and '.join(of_each)} each; {folder}", flush=True)
    elsewhere, before = every, None
    try:
        while elsewhere and elsewhere != before:  # those that others have left by now, again
            before = elsewhere
            elsewhere = [cell for cell in before if not comparison.run(cell, options.trials)]
    except (KeyboardInterrupt, SystemExit):  # after a signal, once the run's checkpoint is saved
        print("interrupted; the same command goes on", flush=True)
        raise
    with files_of_the_command():
        found = comparison.record_outcome(folder, every, options.trials)
    if elsewhere:
        names = ", ".join(cell.name for cell in elsewhere)
        print(f"at work in other processes: {names}; the same command goes on")
        return 0
    sys.stdout.write(comparison.outcome_text(found))
    if (runs := folder / comparison.RUNS_CSV).exists():
        print(f"  {shlex.join(['nmrun', 'table', str(runs)])}")
    return 1 if found.failed else 0
