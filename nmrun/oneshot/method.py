"""What a one-shot method is: one layer's weight and its inputs in, the pruned weight out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from nmrun.patterns import Pattern
from nmrun.ranges import FLAG, number
from nmrun.sparsity.masks import nm_mask


@dataclass
class Method:
    """Base of all methods; the fields of a subclass are its hyperparameters."""

    name: ClassVar[str] = ""

    def prune(self, weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        """Prune the weight of one layer.

        Args:
            weight: (outputs, inputs), in float32 or float64.
            gram: ``X^T X``, (inputs, inputs), of the calibration inputs X (tokens, inputs). The
                output error of a weight V is ``tr((V - W) X^T X (V - W)^T)``.
            pattern: N:M along the inputs. With a length (:meth:`Pattern.over`) each run of so many
                inputs has groups of its own, the last of which may be short; a convolution has a
                run for every kernel position.

        Returns:
            A new tensor of the same shape, with +0.0 in pruned places.
        """
        raise NotImplementedError


@dataclass
class Scored(Method):
    """A method that keeps the N weights of a group with the largest scores, as they are.

    Args:
        permute: before a layer is pruned, order its input channels so that the masks keep more of
            the scores.
    """

    permute: Annotated[bool, FLAG] = False

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        """Score every weight (outputs, inputs), 0 or more. ``norms``: ``||X_j||_2`` of every input
        over all calibration tokens, (inputs,)."""
        raise NotImplementedError

    def prune(self, weight: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        scores = self.scores(weight, gram.diagonal().sqrt())
        runs = scores.unflatten(1, (-1, pattern.length or scores.shape[1]))
        return torch.where(nm_mask(runs, pattern, dim=2).flatten(1), weight, 0.0)


@dataclass
class Magnitude(Scored):
    """Score ``|W_ij|``."""

    name: ClassVar[str] = "magnitude"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs()


@dataclass
class Wanda(Scored):
    """Score ``|W_ij| * ||X_j||_2``."""

    name: ClassVar[str] = "wanda"

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        return weight.abs() * norms


@dataclass
class RIA(Scored):
    """Score ``(|W_ij| / sum_i |W_ij| + |W_ij| / sum_j |W_ij|) * ||X_j||_2^a``.

    Args:
        a: how much the activations count; 0.5 in the paper.
    """

    name: ClassVar[str] = "ria"

    a: Annotated[float, number(0)] = 0.5

    def scores(self, weight: Tensor, norms: Tensor) -> Tensor:
        size = weight.abs()
        least = torch.finfo(size.dtype).tiny  # a column or row of zeros has the score 0
        of_column = size / size.sum(0, keepdim=True).clamp_min(least)
        of_row = size / size.sum(1, keepdim=True).clamp_min(least)
        return (of_column + of_row) * norms**self.a
