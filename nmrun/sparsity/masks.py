"""Masks and projections for any N:M pattern.

The compiled kernels compute them of contiguous weights where they apply, else torch (:mod:`nmrun.sparsity.reference`),
with the same bits. Autograd does not record them. ``dim`` is the dimension that groups run along: 1
for ``nn.Linear`` (out, in) and for convolutions (out, in, kh, kw), whose groups are M input
channels at one kernel position. M must divide its size, or a ValueError says so. With ``pad=True``,
or with a pattern made :meth:`Pattern.over` this size, zeros fill up the last group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nmrun.kernels import projection
from nmrun.kernels.layout import has_memory
from nmrun.patterns import Pattern
from nmrun.sparsity import reference


@torch.no_grad()
def nm_mask(weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False) -> Tensor:
    """Find the N largest magnitudes of every M consecutive weights.

    Ties keep the lower index. Zeros count like any magnitude. A NaN is always kept, beside the N
    largest, so that it shows in the loss.

    For V:N:M, every block of V outputs and M inputs first keeps the four inputs with the largest
    sum of magnitudes. The N largest of each row are then found among these (Zhao et al. 2024, arXiv
    2410.16135; VENOM's code searches all sets of four inputs instead).

    Example: ``nm_mask(torch.tensor([[3., -1., 2., 0.]]), "2:4")`` is ``[[True, False, True,
    False]]``.

    Args:
        weight: of any shape.
        dim: the dimension that groups run along: 1 for ``nn.Linear`` (out, in) and convolutions
            (out, in, height, width).
        pad: let the last group be short.

    Returns:
        The mask: bool, shape of ``weight``, True = kept. Each group has exactly N, and a short last
            group of N or fewer weights keeps all.

    Raises:
        ValueError: for a ``dim`` that ``weight`` has not, and where M does not divide its size, unless
            ``pad``. Also where V does not divide the number of outputs: dimension 0, or 1 where
            ``dim`` is 0.
    """
    pattern, dim = _over(weight, pattern, dim, pad)
    mask = torch.empty_like(weight, dtype=torch.bool)
    if _fits_kernels(weight, pattern) and projection.mask(weight.detach(), mask, pattern, dim):
        return mask
    return reference.nm_mask(weight, pattern, dim)


@torch.no_grad()
def hard_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False
) -> Tensor:
    """Keep the N largest magnitudes of every M consecutive weights and set the others to 0: the
    projection of SR-STE and STEP.

    Arguments and errors are those of :func:`nm_mask`. Returns a new tensor in shape and dtype of
    ``weight``: ``weight`` where the mask is True, +0.0 elsewhere.
    """
    pattern, dim = _over(weight, pattern, dim, pad)
    projected = _kernel_projection(weight, pattern, dim, soft=False)
    return reference.hard_threshold(weight, pattern, dim) if projected is None else projected


@torch.no_grad()
def soft_threshold(
    weight: Tensor, pattern: str | Pattern, dim: int = 1, pad: bool = False, gamma: float = 0.0
) -> Tensor:
    """Shrink all magnitudes of a group so that at most N are left: S-STE's continuous projection before
    scaling, ``S(w) = sign(w) * max(|w| - t, 0)`` (Hu et al. 2024, arXiv 2409.09099, section 4.1).

    The threshold t is the (N+1)-th largest magnitude of the group, and 0 in a group of N or fewer.
    No smaller t leaves at most N non-zeros. For c > 0, ``S(c * w) = c * S(w)``. Every t from there
    up to the N-th largest magnitude is continuous too: ``gamma``, 0 to 1, says how far t is on the
    way.

    Other arguments and errors are those of :func:`nm_mask`. Also raises ValueError for another gamma
    and for V:N:M patterns. Returns S(w), in shape and dtype of ``weight``.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma}: it takes a number from 0 to 1")
    pattern, dim = _over(weight, pattern, dim, pad)
    projected = None if gamma else _kernel_projection(weight, pattern, dim, soft=True)
    return reference.soft_threshold(weight, pattern, dim, gamma) if projected is None else projected


@torch.no_grad()
def soft_threshold_scale(
    weight: Tensor,
    pattern: str | Pattern,
    dim: int = 1,
    pad: bool = False,
    gamma: float = 0.0,
    fit: str = "mse",
) -> Tensor:
    """The factor that makes up for what :func:`soft_threshold` shrinks: S-STE's beta (Hu et al. 2024,
    arXiv 2409.09099, section 4.2 and table 2).

    ``fit="mse"``: ``beta = <w, S(w)> / ||S(w)||^2``, with which ``beta * S(w)`` is nearest to ``w``
    in the mean square. ``fit="l1"``: ``beta = ||w||_1 / ||S(w)||_1``, which keeps the sum of
    magnitudes. Raises ValueError for another one. Sums are in double precision. Other arguments and
    errors are those of :func:`soft_threshold`.

    Returns beta for the whole tensor: 0-dimensional, in the dtype of ``weight``; 1.0 where S(w) is
    0 everywhere.
    """
    if fit not in ("mse", "l1"):
        raise ValueError(f"fit={fit!r}: it takes mse or l1")
    shrunk = soft_threshold(weight, pattern, dim, pad, gamma).double()
    dense = weight.detach().double()
    if fit == "l1":
        over, under = dense.abs().sum(), shrunk.abs().sum()
    else:
        over, under = (dense * shrunk).sum(), shrunk.square().sum()
    return torch.where(under > 0, over / under, 1.0).to(weight.dtype)


def _over(weight: Tensor, pattern: str | Pattern, dim: int, pad: bool) -> tuple[Pattern, int]:
    pattern, dim = Pattern.parse(pattern), reference.along(weight, dim)
    return (pattern.over(weight.shape[dim]) if pad and weight.dim() else pattern), dim


def _kernel_projection(weight: Tensor, pattern: Pattern, dim: int, soft: bool) -> Tensor | None:
    out = torch.empty_like(weight)
    fits = _fits_kernels(weight, pattern)
    return out if fits and projection.project(weight.detach(), out, pattern, dim, soft) else None


def _fits_kernels(weight: Tensor, pattern: Pattern) -> bool:
    least = 1 if pattern.v == 1 else 2  # blocks have outputs too
    return weight.dim() >= least and has_memory(weight) and weight.is_contiguous()
