"""STEP's rules of the switch by name."""

from __future__ import annotations

from nmrun.recipes.autoswitch import AutoSwitch
from nmrun.recipes.gradient_norm import GradientNorm
from nmrun.recipes.switch import Fixed, Switch
from nmrun.recipes.variance_ratio import VarianceRatio
from nmrun.registry import did_you_mean

OF_AUTOSWITCH = ("auto", "auto_geometric")
OTHERS = {"variance_ratio": VarianceRatio, "gradient_norm": GradientNorm}


def chosen(
    rule: str | float,
    window: str,
    threshold: float | None,
    t_min: float,
    t_max: float,
    total_steps: int,
) -> Switch:
    """The switch of a run.

    Args:
        rule: a name, or the fraction of all steps at which to switch.
        window, threshold: of AutoSwitch alone.
        t_min, t_max, total_steps: see :class:`nmrun.recipes.switch.Switch`.

    Raises:
        ValueError: for an unknown rule, and for options that it does not have.
    """
    if rule in OF_AUTOSWITCH:
        geometric, partial = rule == "auto_geometric", window == "partial"
        return AutoSwitch(geometric, partial, threshold, t_min, t_max, total_steps)
    if window != "full" or threshold is not None:
        raise ValueError(
            f"step: window and threshold are of switch=auto and auto_geometric, not of switch={rule}"
        )
    if rule in OTHERS:
        return OTHERS[str(rule)](t_min, t_max, total_steps)
    try:
        fraction = float(rule)
    except (TypeError, ValueError):
        names = (*OF_AUTOSWITCH, *OTHERS)
        raise ValueError(
            f"step: switch={rule!r} is neither a fraction in (0, 1) nor one of {', '.join(names)}"
            f"{did_you_mean(str(rule), names)}"
        ) from None
    if not 0 < fraction < 1:
        raise ValueError(
            f"step: switch={rule} must be a fraction of all steps between 0 and 1, both excluded"
        )
    return Fixed(fraction, total_steps)
