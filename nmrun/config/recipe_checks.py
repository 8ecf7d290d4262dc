"""Which values the hyperparameters take of the recipes whose keys are in ``conf/recipe``.

A recipe without a file there says its keys itself; see ``nmrun.config.recipe_fields``.
"""

from __future__ import annotations

from nmrun.ranges import DECAY, FLAG, FRACTION, SPAN, SWITCH, Check, number, one_of, whole

KINDS = ("mask", "mask_exponential", "structure", "structure_geometric")
RECIPE_CHECKS: dict[str, Check] = {
    "prune_at": FRACTION,
    "permute": FLAG,
    "decay": DECAY,
    "switch": SWITCH,
    "t_min": number(0, 1),
    "t_max": number(0, 1),
    "eps_mode": one_of("inside", "outside", "floor"),
    "bias_correction": FLAG,
    "interval": whole(1),
    "candidates": whole(1),
    "gradient": one_of("ste", "masked"),
    "dense_end": FRACTION,
    "tau": number(0, open_low=True, optional=True),
    "dense": FRACTION,
    "final": number(0, 1, open_low=True),
    "grad_mode": one_of("scaled", "ste"),
    "frames": whole(1),
    "kind": one_of(*KINDS),
    "t_i": FRACTION,
    "t_f": number(0, 1, open_low=True, open_high=True),
    "kappa": SPAN,
    "temperature": SPAN,
    "prior": number(0),
    "reg": number(0),
    "lr_mult": number(0, open_low=True),
}
