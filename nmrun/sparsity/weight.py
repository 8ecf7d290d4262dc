"""One sparse weight: the parameter is its projection, the optimizer's state has the dense weight.

Outside a step the parameter is the projected weight, at one address. In a step it points at the
dense weight (:meth:`SparseWeight.show_dense`), so that any optimizer moves that one. A parameter
that is sharded, shares its storage or is captured by a CUDA graph keeps its memory: values are
copied.

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
from torch import Tensor, nn

from nmrun.kernels.layout import local
from nmrun.patterns import Pattern
from nmrun.ranks import part_like
from nmrun.sparsity.reference import grouped, holds

PREFIX = "nmrun_"
# the parameters that are sparse now, by id, of all handles
LIVE: weakref.WeakValueDictionary[int, nn.Parameter] = weakref.WeakValueDictionary()
FIRST_MASK = "first_mask"  # packed bits, see nmrun.sparsity.metrics


class SparseWeight:
    """A sparse parameter of a model.

    Attributes:
        module_name, module, attribute: the module that has the parameter, and its name there.
        parameter: the ``nn.Parameter``; in sparse phases it is the projected weight.
        pattern, dim: the N:M pattern, and the dimension that groups run along.
        dependents: functions that are called with this weight after each projection.
        layer: how the layer's products are computed (``nmrun.products.layer``), None for torch's.
        copies: whether the parameter keeps its memory in a step.
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
        self.layer: Any = None
        self.copies = False
        self.version = self.parameter._version
        self._tensors: dict[str, Tensor] = {}
        self._address: Tensor | None = None  # in a step: the memory of the projected weight

    @property
    def name(self) -> str:
        """The parameter's name in the model, such as ``layer1.conv.weight``."""
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute

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
        own = self._tensors.get("dense")
        return local(self.parameter.detach() if own is None else own)

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
        """Say whether the weight has a tensor of this name."""
        return key in self._tensors

    def __getitem__(self, key: str) -> Tensor:
        """Return a tensor that the recipe keeps for this weight. Raises KeyError where there is
        none of this name."""
        return local(self._tensors[key])

    def __setitem__(self, key: str, value: Tensor) -> None:
        """Keep a tensor for this weight; the optimizer's state dict saves it. ``key``: its name,
        without ``nmrun_``. ``value``: the tensor. If it has the shape of :attr:`dense`, it is
        sharded like the weight."""
        alike = self.is_sharded and value.shape == self.dense.shape
        self._tensors[key] = self.as_shard(value) if alike else value

    def with_dense(self, dense: Tensor) -> SparseWeight:
        """Return this weight with another dense weight, such as an average. ``dense``: the other
        dense weight. All other tensors are shared."""
        other = copy.copy(self)
        other._tensors = {**self._tensors, "dense": dense}
        other.dependents = []
        return other

    def whole(self, part: Tensor) -> Tensor:
        """Gather a tensor from all processes that have a part of it. All of them must call.
        ``part``: this process's part, of the shape of :attr:`dense`. Returns the whole tensor,
        of :attr:`shape`; ``part`` itself where the weight is not sharded."""
        if not self.is_sharded:
            return part
        plain = part.view(torch.uint8) if part.dtype == torch.bool else part
        full: Tensor = self.as_shard(plain.contiguous()).full_tensor()
        return full.view(part.dtype)

    def part(self, whole: Tensor) -> Tensor:
        """Return this process's part of a whole tensor: the inverse of :meth:`whole`. ``whole``: a
        tensor of :attr:`shape`, the same on all processes."""
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
        """Let the parameter be the projected weight, as it was before :meth:`show_dense`."""
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
        """Whether the parameter is the dense weight now, between those two calls."""
        return self._address is not None

    def holds(self) -> bool:
        """Say whether the forward weight holds the pattern."""
        return holds(*grouped(self.weight, self.pattern, self.dim))

    def moved(self) -> bool:
        """Say whether the parameter was written in place since :attr:`version`.

        A write through ``.data`` leaves the version as it is and is not noticed.
        """
        return self.parameter._version != self.version

    # --- the optimizer's state ------------------------------------------------------------------

    def pop_state(
        self, optimizer: torch.optim.Optimizer, dtypes: Mapping[str, str] | None = None
    ) -> None:
        """Move this weight's tensors out of the optimizer's state.

        The tensors in the state replace those of before, since ``load_state_dict`` may have written
        them. It casts what it loads, so dtypes and devices are set right here. ``dtypes``: the
        saved :attr:`dtypes`, for a weight that has no such tensors yet.
        """
        state = optimizer.state.get(self.parameter)
        if not state:
            return
        for key in [key for key in state if isinstance(key, str) and key.startswith(PREFIX)]:
            name = key.removeprefix(PREFIX)
            self.restore(name, state.pop(key), (dtypes or {}).get(name))
        if not state:  # the optimizer has not stepped: it looks for an empty state
            del optimizer.state[self.parameter]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of each tensor that differs from the parameter's, such as ``bool``."""
        own, tensors = self.parameter.dtype, self._tensors.items()
        return {key: str(t.dtype).removeprefix("torch.") for key, t in tensors if t.dtype != own}

    def restore(self, key: str, value: Tensor, kind: str | None = None) -> None:
        """Keep a tensor that was saved, on the parameter's device.

        The dense weight gets the parameter's dtype, and a tensor that replaces another gets the
        dtype of that one. ``key``: its name, without ``nmrun_``. ``value``: the tensor, whole or
        sharded like the weight. ``kind``: the dtype of a new tensor, such as ``"bool"``. None, the
        default: that of ``value``.
        """
        dtype: torch.dtype = getattr(torch, kind) if kind else value.dtype
        if key in self._tensors:
            dtype = self._tensors[key].dtype
        if key == "dense":
            dtype = self.parameter.dtype
        # torch.distributed.checkpoint may have loaded it whole
        self._tensors[key] = part_like(value, self.parameter).to(self.parameter.device, dtype)

    def put_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this weight's tensors into the optimizer's state, so that its state dict saves them."""
        if self._tensors:
            state = optimizer.state[self.parameter]
            for key, value in self._tensors.items():
                state[PREFIX + key] = value

    def saved(self) -> dict[str, Tensor]:
        """Return the tensors that are saved with the optimizer, by name, without ``nmrun_``."""
        return dict(self._tensors)

    def clear(self) -> None:
        """Drop the weight's tensors; the parameter stays as it is."""
        self._tensors = {}
