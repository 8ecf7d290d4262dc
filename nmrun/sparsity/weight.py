"""One sparse weight: the parameter is its projection, the optimizer's state has the dense weight.

Outside a step the parameter is the projected weight, at one address. In a step it points at the
dense weight (:meth:`SparseWeight.show_dense`), so that any optimizer moves that one.

The dense weight and the recipe's tensors lie in ``optimizer.state[parameter]`` under names that
begin with ``nmrun_``. In a step they are removed from there, since an optimizer initialises its
state where it finds none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from nmrun.kernels.layout import local, part_like
from nmrun.sparsity.layers import Candidate
from nmrun.sparsity.reference import grouped, holds

PREFIX = "nmrun_"
# the parameters that are sparse now, by id, of all handles
LIVE: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
# what torch's optimizers look for in every state that is not empty, when they are copied or loaded:
# numbers, which they have before any moments
LOOKED_FOR: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((optim.Adam, optim.AdamW, optim.Adamax, optim.RAdam, optim.RMSprop), ("step",)),
    **dict.fromkeys((optim.Rprop, optim.Adadelta, optim.Adafactor), ("step",)),
    optim.NAdam: ("step", "mu_product"),
    optim.ASGD: ("step", "eta", "mu"),
}
NUMBERS = {key for keys in LOOKED_FOR.values() for key in keys}
FIRST_MASK = "first_mask"  # packed bits, see nmrun.sparsity.metrics


class SparseWeight:
    """A sparse parameter of a model.

    Attributes:
        parameter: the ``nn.Parameter``; in sparse phases it is the projected weight.
        dependents: functions that are called with this weight after each projection.
        layer: how the layer's products are computed (``nmrun.products.layer``), None for torch's.
        copies: whether the parameter keeps its memory in a step, and values are copied: it is
            sharded, shares its storage or is captured by a CUDA graph.
    """

    def __init__(self, selected: Candidate) -> None:
        assert selected.pattern is not None
        self.name, self.module_name = selected.name, selected.module_name
        self.module, self.attribute = selected.module, selected.attribute
        self.parameter = selected.parameter
        self.pattern, self.dim, self.outputs = selected.pattern, selected.dim, selected.outputs
        self.dependents: list[Callable[[SparseWeight], None]] = []
        self.layer: Any = None
        self.copies = False
        self._tensors: dict[str, Tensor] = {}
        self._address: Tensor | None = None  # in a step: the memory of the projected weight
        self.note()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight, also where this process has only a part."""
        return self.parameter.shape

    @property
    def is_sharded(self) -> bool:
        """Whether this process has only a part of the weight (a ``DTensor``)."""
        return hasattr(self.parameter, "_local_tensor")

    # --- its tensors; of a sharded weight, this process's part as a plain tensor ----------------

    @property
    def has_dense(self) -> bool:
        """Whether the dense weight is a tensor beside the parameter, as in sparse phases."""
        return "dense" in self._tensors

    @property
    def dense(self) -> Tensor:
        """The dense weight, without gradient; in dense phases it is the parameter itself."""
        dense = self._tensors.get("dense")
        return local(self.parameter.detach() if dense is None else dense)

    @property
    def weight(self) -> Tensor:
        """The weight that the forward pass uses, without gradient."""
        used = self.parameter.detach() if self._address is None else self._address
        return local(used)

    @property
    def grad(self) -> Tensor | None:
        """The gradient at the forward weight; None before a backward pass."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def __getitem__(self, key: str) -> Tensor:
        """A tensor that the recipe keeps for this weight. Raises KeyError where there is none of
        this name."""
        return local(self._tensors[key])

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Keep a tensor, which the optimizer's state dict saves. One of the shape of :attr:`dense`
        is sharded like the weight. Raises ValueError for the dense weight's own name."""
        if key == "dense":
            raise ValueError("a recipe's tensor needs a name other than dense, the dense weight's")
        is_part = self.is_sharded and value.shape == self.dense.shape
        self._tensors[key] = self.as_shard(value) if is_part else value

    def with_dense(self, dense: Tensor) -> SparseWeight:
        """This weight with another dense weight, such as an average; all other tensors are shared."""
        other = copy.copy(self)
        other._tensors = {**self._tensors, "dense": dense}
        return other

    def whole(self, part: Tensor) -> Tensor:
        """Gather a tensor of the shape of :attr:`dense` from all processes that have a part of it.
        All of them must call."""
        if not self.is_sharded:
            return part
        plain = part.view(torch.uint8) if part.dtype == torch.bool else part
        full: Tensor = self.as_shard(plain.contiguous()).full_tensor()
        return full.view(part.dtype)

    def part(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor: the inverse of :meth:`whole`."""
        return local(part_like(whole, self.parameter))

    def as_shard(self, part: Tensor) -> Any:
        """A tensor shaped like :attr:`dense` as the ``DTensor`` that a sharded parameter is."""
        from torch.distributed.tensor import DTensor

        p: Any = self.parameter
        return DTensor.from_local(
            part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    # --- between dense and projected ------------------------------------------------------------

    @torch.no_grad()
    def begin_sparse(self) -> None:
        """Copy the parameter to the dense weight. The caller then projects into the parameter."""
        self._tensors["dense"] = self.parameter.detach().clone()

    @torch.no_grad()
    def end_sparse(self) -> None:
        """Copy the dense weight into the parameter, and drop the dense weight's own tensor."""
        if "dense" in self._tensors:
            local(self.parameter.detach()).copy_(self.dense)
            del self._tensors["dense"]

    def forget_dense(self) -> None:
        """Drop the dense weight; the parameter stays as it is."""
        self._tensors.pop("dense", None)

    @torch.no_grad()
    def show_dense(self) -> None:
        """Let the parameter be the dense weight, until :meth:`show_projected`."""
        if "dense" not in self._tensors or self._address is not None:
            return
        self._address = self.parameter.data
        if self.copies:
            self._address = self._address.clone()
            local(self.parameter.detach()).copy_(self.dense)
        else:
            self.parameter.data = self._tensors["dense"]

    @torch.no_grad()
    def show_projected(self) -> None:
        if self._address is None:
            return
        if self.copies:
            self.dense.copy_(local(self.parameter.detach()))
            local(self.parameter.detach()).copy_(local(self._address))
        else:
            moved = self.parameter.data
            if moved.data_ptr() == self.dense.data_ptr():
                torch.autograd.graph.increment_version(self.dense)  # written under another name
            else:
                self._tensors["dense"] = moved
            self.parameter.data = self._address
        self._address = None

    @property
    def shows_dense(self) -> bool:
        return self._address is not None

    def holds(self) -> bool:
        return holds(*grouped(self.weight, self.pattern, self.dim))

    def is_pruned(self) -> bool:
        """Whether the dense weight holds the pattern too, which prunes something."""
        return self.pattern.n < self.pattern.m and holds(
            *grouped(self.dense, self.pattern, self.dim)
        )

    def note(self) -> None:
        """Note the parameter as it is, for the three questions that follow."""
        self._version, self._dtype = self.parameter._version, self.parameter.dtype
        self._place = self._data_ptr()

    def _data_ptr(self) -> int:
        return 0 if self.is_sharded else self.parameter.data_ptr()

    def moved(self) -> bool:
        """Whether the parameter was written in place since :meth:`note`; a write through ``.data`` is
        not noticed."""
        return self.parameter._version != self._version

    def is_cast(self) -> bool:
        """Whether the parameter has another dtype than at :meth:`note`."""
        return self.parameter.dtype != self._dtype

    def is_elsewhere(self) -> bool:
        """Whether the parameter got other memory since :meth:`note`, as by ``p.data = ...``."""
        return self._data_ptr() != self._place

    def is_stored_otherwise(self, dense: Tensor) -> bool:
        """Whether the parameter has another memory format than a dense weight that it is to point at in
        a step. Its gradient has that of the parameter, and torch's fused kernels on the CPU take
        them for alike."""
        return not self.copies and self.parameter.stride() != dense.stride()

    def is_replaced(self) -> bool:
        """Whether the module has another parameter in the place of this one."""
        now = getattr(self.module, self.attribute, None)
        if self.is_sharded and not hasattr(now, "_local_tensor"):
            return False  # fully_shard shows the gathered weight after a forward pass
        return now is not self.parameter

    # --- the optimizer's state ------------------------------------------------------------------

    def pop_state(
        self, optimizer: torch.optim.Optimizer, dtypes: Mapping[str, str] | None = None
    ) -> None:
        """Move this weight's tensors out of the optimizer's state, where ``load_state_dict`` may
        have written them. It casts what it loads, so dtypes and devices are set right here.
        ``dtypes``: the saved :attr:`dtypes`, for a weight that has no such tensors yet."""
        state = optimizer.state.get(self.parameter)
        if not state:
            return
        for key in [key for key in state if isinstance(key, str) and key.startswith(PREFIX)]:
            name = key.removeprefix(PREFIX)
            self.restore(name, state.pop(key), (dtypes or {}).get(name))
        if never_stepped(state):  # the optimizer looks for an empty state
            del optimizer.state[self.parameter]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor that differs from the parameter's, such as ``bool``."""
        usual, tensors = self.parameter.dtype, self._tensors.items()
        return {key: str(t.dtype).removeprefix("torch.") for key, t in tensors if t.dtype != usual}

    def restore(self, key: str, value: Tensor, kind: str | None = None) -> None:
        """Keep a tensor that was saved, whole or sharded, on the parameter's device. The dense
        weight gets the parameter's dtype, one that replaces another the dtype of that one, a new
        one ``kind``, such as ``"bool"``."""
        dtype: torch.dtype = getattr(torch, kind) if kind else value.dtype
        if key in self._tensors:
            dtype = self._tensors[key].dtype
        if key == "dense":
            dtype = self.parameter.dtype
        # torch.distributed.checkpoint may have loaded it whole
        part = part_like(value, self.parameter).to(self.parameter.device, dtype)
        if key == "dense" and self.is_stored_otherwise(part):
            part = torch.empty_like(self.parameter).copy_(part)
        self._tensors[key] = part

    def put_state(self, optimizer: torch.optim.Optimizer) -> None:
        if self._tensors:
            state = optimizer.state[self.parameter]
            for key, value in self._tensors.items():
                state[PREFIX + key] = value

    def saved(self) -> dict[str, Tensor]:
        """The tensors that are saved with the optimizer, by name, without ``nmrun_``."""
        return dict(self._tensors)

    def clear(self) -> None:
        """Drop all tensors. A parameter that shows the dense weight keeps its numbers, in its own
        memory."""
        if self._address is not None:
            self.show_projected()
            self.end_sparse()
        self._tensors = {}


def never_stepped(state: Mapping[Any, Any]) -> bool:
    """Whether an optimizer's state of a weight has nothing but the weight's own tensors, and a count
    of no steps with what may stand beside it."""
    others = {key for key in state if not str(key).startswith(PREFIX)}
    return not others or (others <= NUMBERS and "step" in others and not state["step"])
