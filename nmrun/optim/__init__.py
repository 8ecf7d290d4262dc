"""Adam and AdamW whose second moment can be frozen and that carry out a rule in their own pass;
SGD. Where nothing is compiled, none of them imports torch's compiler.
"""

from nmrun.optim.adam import EPS_MODES, Adam, AdamW
from nmrun.optim.stock import SGD

__all__ = ["EPS_MODES", "SGD", "Adam", "AdamW"]
