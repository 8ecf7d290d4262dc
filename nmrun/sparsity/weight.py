"""One sparse weight: the parameter holds its projection, the optimizer's state the dense weight.

Outside a step ``parameter`` is the projected weight, at one address. In a step the parameter
points at the dense weight (:meth:`SparseWeight.expose`), so that any optimizer moves that one;
afterwards it points at the old memory again (:meth:`SparseWeight.cover`), which then gets the new
projection. A sharded parameter, one that shares its storage and one whose step is captured keep
their memory and are copied to and fro instead.

What a recipe keeps for a weight, the dense weight among it, lies in ``optimizer.state[parameter]``
under names that begin with ``nmrun_``. In a step it is taken out: optimizers look whether a state
is empty.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nmrun.kernels.layout import local
from nmrun.patterns import Pattern
from nmrun.ranks import part_like
from nmrun.sparsity.masks import grouped

PREFIX = "nmrun_"
# the parameters that are sparse now, by id
LIVE: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
FIRST_MASK = "first_mask"  # packed bits, see nmrun.sparsity.metrics


class SparseWeight:
    """A sparse parameter of a model.

    Attributes:
        name: the parameter's name in the model, such as ``layer1.conv.weight``.
        module_name, module, attribute: where it is.
        parameter: the ``nn.Parameter``; it holds the projected weight in sparse phases.
        pattern, dim: its pattern, and the dimension that groups run along.
        outputs: the dimension of the outputs.
        dependents: called with this weight whenever its projection was rewritten.
    """

    def __init__(
        self,
        module_name: str,
        module: nn.Module,
        attribute: str,
        pattern: Pattern,
        dim: int,
        outputs: int,
    ) -> None:
        self.module_name, self.module, self.attribute = module_name, module, attribute
        self.parameter: nn.Parameter = getattr(module, attribute)
        self.pattern, self.dim, self.outputs = pattern, dim, outputs
        self.dependents: list[Callable[[SparseWeight], None]] = []
        self.layer: Any = None  # how its products are computed, where not as usual
        self.copies = False  # the parameter keeps its memory in a step
        self.version = self.parameter._version  # when its values were last ours
        self._tensors: dict[str, Tensor] = {}
        self._address: Tensor | None = None  # in a step: the memory of the projected weight

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight, also where this process has a part."""
        return self.parameter.shape

    @property
    def is_sharded(self) -> bool:
        """Whether this process has a part of the weight only (a ``DTensor``)."""
        return hasattr(self.parameter, "_local_tensor")

    # --- its tensors: of a sharded weight this process's part, as a plain tensor ---------------

    @property
    def has_dense(self) -> bool:
        """Whether there is a dense weight beside the parameter: in sparse phases."""
        return "dense" in self._tensors

    @property
    def dense(self) -> Tensor:
        """The dense weight; in dense phases the parameter's own values. No gradient."""
        kept = self._tensors.get("dense")
        return local(self.parameter.detach() if kept is None else kept)

    @property
    def weight(self) -> Tensor:
        """The weight that the forward pass uses. No gradient."""
        used = self.parameter.detach() if self._address is None else self._address
        return local(used)

    @property
    def grad(self) -> Tensor | None:
        """The gradient at the forward weight."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> Tensor:
        """A tensor that the recipe keeps for this weight."""
        return local(self._tensors[key])

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Keep a tensor for this weight; it is saved with the optimizer's state."""
        alike = self.is_sharded and value.shape == self.dense.shape
        self._tensors[key] = self._as_shard(value) if alike else value

    def of(self, dense: Tensor) -> SparseWeight:
        """This weight with another dense weight, as an average has it; the recipe's tensors are
        shared."""
        other = copy.copy(self)
        other._tensors = {**self._tensors, "dense": dense}
        other.dependents = []
        return other

    def whole(self, part: Tensor) -> Tensor:
        """A tensor shaped like :attr:`dense`, of all processes; all of them have to ask."""
        if not self.is_sharded:
            return part
        plain = part.view(torch.uint8) if part.dtype == torch.bool else part
        full: Tensor = self._as_shard(plain.contiguous()).full_tensor()
        return full.view(part.dtype)

    def part(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor: the inverse of :meth:`whole`."""
        if not self.is_sharded:
            return whole
        from torch.distributed.tensor import distribute_tensor

        like: Any = self.parameter
        plain = whole.view(torch.uint8) if whole.dtype == torch.bool else whole
        mesh, placements = like.device_mesh, like.placements
        cut = distribute_tensor(plain, mesh, placements, src_data_rank=None)  # everyone has it
        return local(cut).view(whole.dtype)

    def _as_shard(self, part: Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        p: Any = self.parameter
        return DTensor.from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    # --- between dense and projected ------------------------------------------------------------

    @torch.no_grad()
    def begin_sparse(self) -> None:
        """The parameter's values become the dense weight; a projection has to follow."""
        self._tensors["dense"] = self.parameter.detach().clone()

    @torch.no_grad()
    def end_sparse(self) -> None:
        """The parameter becomes the dense weight, which leaves the optimizer's state."""
        if "dense" in self._tensors:
            local(self.parameter.detach()).copy_(self.dense)
            del self._tensors["dense"]

    @torch.no_grad()
    def expose(self) -> None:
        """Let the parameter be the dense weight, for a step."""
        if "dense" not in self._tensors or self._address is not None:
            return
        self._address = self.parameter.data
        if self.copies:
            self._address = self._address.clone()
            local(self.parameter.detach()).copy_(self.dense)
        else:
            self.parameter.data = self._tensors["dense"]

    @torch.no_grad()
    def cover(self) -> None:
        """Let the parameter be the projected weight again, as it was before :meth:`expose`."""
        if self._address is None:
            return
        if self.copies:
            self.dense.copy_(local(self.parameter.detach()))
            local(self.parameter.detach()).copy_(local(self._address))
        else:
            self._tensors["dense"] = self.parameter.data
            self.parameter.data = self._address
        self._address = None

    @property
    def is_exposed(self) -> bool:
        """Whether the parameter is the dense weight now: in a step."""
        return self._address is not None

    def holds(self) -> bool:
        """Whether the forward weight holds the pattern."""
        groups, _, d = grouped(self.weight, self.pattern, self.dim)
        return bool(((groups != 0).sum(d) <= self.pattern.n).all())

    def moved(self) -> bool:
        """Whether the parameter was written since :attr:`version` by a call that moves it."""
        return self.parameter._version != self.version

    # --- the optimizer's state ------------------------------------------------------------------

    def take(
        self, optimizer: torch.optim.Optimizer, dtypes: Mapping[str, str] | None = None
    ) -> None:
        """Take this weight's tensors out of the optimizer's state; what was replaced counts.

        ``load_state_dict`` and ``model.to`` give tensors another dtype or device: masks become
        bool again, the dense weight follows the parameter. ``dtypes`` are by :attr:`dtypes`.
        """
        state = optimizer.state.get(self.parameter)
        if not state:
            return
        for key in [key for key in state if isinstance(key, str) and key.startswith(PREFIX)]:
            name = key.removeprefix(PREFIX)
            self.adopt(name, state.pop(key), (dtypes or {}).get(name))
        if not state:  # nothing of the optimizer's own: it has not begun
            del optimizer.state[self.parameter]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of tensors that have not the parameter's, for :meth:`take` by who does not
        know them yet."""
        own, kept = self.parameter.dtype, self._tensors.items()
        return {key: str(t.dtype).removeprefix("torch.") for key, t in kept if t.dtype != own}

    def adopt(self, key: str, value: Tensor, kind: str | None = None) -> None:
        """Keep a tensor that was saved, in the dtype and on the device that it belongs to."""
        dtype: torch.dtype = getattr(torch, kind) if kind else value.dtype
        if key in self._tensors:
            dtype = self._tensors[key].dtype
        if key == "dense":
            dtype = self.parameter.dtype
        # a state dict that was loaded whole
        self._tensors[key] = part_like(value, self.parameter).to(self.parameter.device, dtype)

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this weight's tensors into the optimizer's state."""
        if self._tensors:
            state = optimizer.state[self.parameter]
            for key, value in self._tensors.items():
                state[PREFIX + key] = value

    def saved(self) -> dict[str, Tensor]:
        """What :meth:`give` gives, without the prefix."""
        return dict(self._tensors)

    def forget(self) -> None:
        """Drop the tensors that are kept for this weight; the parameter stays as it is."""
        self._tensors = {}


def owns_its_storage(parameter: Tensor) -> bool:
    """Whether a parameter is a plain tensor that alone uses its whole storage."""
    if type(parameter) is not nn.Parameter or hasattr(parameter, "_local_tensor"):
        return False
    size = parameter.numel() * parameter.element_size()
    return parameter.storage_offset() == 0 and parameter.untyped_storage().nbytes() == size


def summed(weights: Sequence[SparseWeight], sums: Tensor) -> Tensor:
    """Sums over this process's parts, made sums over the whole weights in place."""
    if weights and weights[0].is_sharded:
        like: Any = weights[0].parameter
        for dim, placement in enumerate(like.placements):
            if placement.is_shard():  # other dimensions of the mesh are replicas
                dist.all_reduce(sums, group=like.device_mesh.get_group(dim))
    return sums
