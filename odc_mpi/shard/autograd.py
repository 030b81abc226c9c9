"""Integration of units with autograd: pushing gradients, and saving references instead of parameters.

A unit is a group of parameters that are fetched and released together (`shard.units.unit`). The forward pass of a unit
obtains all of its parameters from one autograd node, `UnshardedParameters`. Autograd runs this node's backward pass
after accumulating the gradients of all the node's outputs. The unit's gradients are then complete and are pushed to the
ranks that own them. A parameter that the forward pass did not use has the gradient None, which is not pushed.

Note: saved parameters
    Autograd saves parameters for the backward pass. If it saved the tensors themselves, every unit would stay unsharded
    until its backward pass. `SavedTensorHooks` therefore saves a reference: unit, array, dtype, offset, shape and
    stride. When the backward pass needs the tensor, the hook unshards the unit and returns a new view. Since torch
    calls only the innermost hooks, `SavedTensorHooks` passes all other tensors to the hooks that were active outside
    the model, such as `save_on_cpu`. Hooks inside the model, as in activation checkpointing, also receive the
    parameters. Saving them there costs memory but is correct. `SavedTensorHooks` is not installed if fetched tensors
    stay valid after release or all units are unsharded.

Note: recomputation
    During the backward pass, activation checkpointing reruns the forward pass of a unit under its own hooks, which must
    see all saved tensors. `SavedTensorHooks` is therefore active only in the outermost forward pass and never in a
    backward pass. As with any saved-tensor hooks, the recomputation in `checkpoint(f, x, x)` passes two different
    tensors to `f`. If `f` compares them by identity, as `nn.MultiheadAttention` does, torch raises `CheckpointError`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from odc_mpi.shard.activity import in_backward
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits

#: Function that pushes the gradients of a unit's named parameters (`shard.gradients.GradientPusher.push`).
Push = Callable[[Unit, Sequence[str], Sequence[torch.Tensor | None], bool], None]
#: Number that exceeds the number of nodes that a backward pass can create.
_MANY = 1 << 40


class UnshardedParameters(torch.autograd.Function):
    """Autograd function that returns an unsharded unit's parameters and, in its backward pass, pushes gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, unit: Unit, names: Sequence[str], push: Push) -> Any:
        """Return the full parameters listed in `names` from an unsharded unit.

        `anchor` is an empty tensor that requires a gradient. Without it, autograd would not create a node.
        """
        ctx.unit, ctx.names, ctx.push = unit, names, push
        ctx.set_materialize_grads(False)
        tensors = tuple(unit.parameter(name) for name in names)
        if unit.frozen:
            ctx.mark_non_differentiable(*(t for t, name in zip(tensors, names, strict=True) if name in unit.frozen))
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        """Push the gradients of the parameters to the ranks that own them. One-sided."""
        ctx.push(ctx.unit, ctx.names, gradients)
        return None, None, None, None


class UnitForwards:
    """Tracker for the units' forward passes that are running or are awaiting their backward passes.

    Within a forward pass, all lookups of a parameter return the same tensor unless grad or inference mode changes.
    """

    def __init__(self, unsharded: UnshardedUnits, push: Push) -> None:
        self.unsharded, self.saved_tensor_hooks = unsharded, SavedTensorHooks(unsharded)
        self._push = push
        # Number of nodes of each unit whose backward has not yet run, for the current version of the parameters.
        self._pending: Counter[Unit] = Counter()
        self._version = 0
        self._anchor = torch.zeros(0, requires_grad=True)
        self._current: dict[Unit, dict[tuple[bool, bool], dict[str, torch.Tensor]]] = {}

    @contextmanager
    def run(self, unit: Unit, *, is_recomputation: bool = False) -> Iterator[None]:
        """Context manager for a unit's forward pass, in which the first use of a parameter fetches the unit.

        `is_recomputation` is True if the pass only recreates saved tensors, so its nodes will have no backward pass.
        Raises RuntimeError on exit if a parameter of the unit was changed in place.
        """
        enclosing, num_pending = self._current.get(unit), self._pending[unit]
        unit.num_running_forwards += 1
        self._current[unit] = {}
        try:
            yield
        finally:
            unit.num_running_forwards -= 1
            if is_recomputation:
                self._pending[unit] = num_pending
            # Dropped, because the tensors keep the fetch buffer alive.
            if enclosing is None:
                del self._current[unit]
            else:
                self._current[unit] = enclosing
        unit.check_unchanged()

    def parameter(self, unit: Unit, name: str) -> torch.Tensor:
        """Return the full parameter `name` of a unit, fetching the unit first if necessary. One-sided."""
        tensors_by_mode = self._current.get(unit)
        if tensors_by_mode is None:
            # Used outside its unit's forward, so it needs a node of its own.
            return self._tensors(unit, (name,))[name]
        # Tensors created without a graph must not be returned to code that needs one.
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if mode not in tensors_by_mode:
            tensors_by_mode[mode] = self._tensors(unit, unit.names)
        return tensors_by_mode[mode][name]

    def register_backward_hook_for(self, unit: Unit, output: Any) -> None:
        """Register a backward hook on a forward pass's `output`, or on its first element if it is a tuple or mapping.

        The hook publishes this rank's status and raises RuntimeError if the parameters have changed since that pass. If
        autograd saves references to parameters, no hook is registered, because `SavedTensorHooks` does the same.
        """
        outputs = tuple(output.values()) if isinstance(output, Mapping) else output
        first = outputs[0] if isinstance(outputs, tuple) and outputs else outputs
        requires_grad = isinstance(first, torch.Tensor) and first.grad_fn is not None
        if requires_grad and self.unsharded.tensors_stay_valid and not in_backward():
            version = self.unsharded.parameter_version

            def on_backward(_: torch.Tensor) -> None:
                self.unsharded.check_current(version)
                self.unsharded.activity.update("backward of", unit.name)

            first.register_hook(on_backward)

    def _tensors(self, unit: Unit, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        self.unsharded.unshard(unit)
        version = self.unsharded.parameter_version
        tensors = UnshardedParameters.apply(self._anchor, unit, names, partial(self._push_if_current, version))
        if self._version != version:
            self._pending.clear()
            self._version = version
        if torch.is_grad_enabled():
            # The number of nodes that a backward creates is not known in advance, so the count must not reach zero.
            self._pending[unit] += _MANY if in_backward() else 1
        return dict(zip(names, tensors, strict=True))

    def _push_if_current(
        self, parameter_version: int, unit: Unit, names: Sequence[str], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self.unsharded.check_current(parameter_version)
        self.unsharded.activity.update("backward of", unit.name)
        self._pending[unit] -= 1
        self._push(unit, names, gradients, self._pending[unit] == 0)


class SavedTensorHooks:
    """Saved-tensor hooks that make autograd save references to parameters instead of the parameters themselves."""

    def __init__(self, unsharded: UnshardedUnits) -> None:
        self._unsharded = unsharded
        self._active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that installs the hooks. No effect if nested, during backward, or if tensors stay valid."""
        if self._active or self._unsharded.tensors_stay_valid or in_backward():
            yield
            return
        self._active = True
        enclosing = torch._C._autograd._top_saved_tensors_default_hooks(False)
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, enclosing), lambda saved: saved()):
                yield
        finally:
            self._active = False

    def _pack(self, enclosing: tuple[Any, Any] | None, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        location = self._unsharded.find(tensor)
        if location is None and enclosing is not None:
            pack, unpack = enclosing
            return partial(unpack, pack(tensor))
        if location is None:
            # Detached, because a saved output that references its own node would never be freed. The version replaces
            # autograd's check for in-place changes, which hooks disable.
            return partial(_unchanged, tensor.detach(), tensor._version)
        view = tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return partial(self._view_of, *location, view, self._unsharded.parameter_version)

    def _view_of(
        self, unit: Unit, array: int, view: tuple[torch.dtype, int, torch.Size, tuple[int, ...]], parameter_version: int
    ) -> torch.Tensor:
        self._unsharded.check_current(parameter_version)
        self._unsharded.unshard(unit)
        return unit.as_strided(array, *view)


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(tensor.shape)} that the backward needs was changed in place: "
            f"expected version {version}, got version {tensor._version}"
        )
    return tensor
