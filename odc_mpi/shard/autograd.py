"""Where autograd meets units: gradients come out complete, and no graph keeps a released unit alive.

The parameters that one call of a unit computes with are the outputs of one autograd node, `UnshardedParameters`. Autograd
runs a node's backward once all uses of its outputs have delivered, which is exactly when the unit's gradient of that
call is complete: it is pushed there. A parameter that the call did not use delivers None and is not pushed.

Note: saved parameters
    The forward saves weights for the backward. Saved as they are, they would keep every unit's buffer alive until the
    backward has passed, the very memory that sharding is to save. `SavedTensorHooks` saves instead where a tensor looked,
    and looks again, fetching the unit if need be, when the backward asks. A tensor that other hooks saved (activation
    checkpointing, offloading) keeps its memory, so it stays right; it only costs more. Where a fetch is a view of
    memory that stays, or all units are ready and none will make room, a graph keeps parameters as any other tensors: to
    look at every saved tensor takes Python's time, 2 % of the step of a model of 8 million parameters.

Note: recomputation
    Activation checkpointing runs a unit's forward again inside the backward, under hooks of its own that must see every
    saved tensor. So `SavedTensorHooks` steps in at the outermost call only, and never inside a backward. As under any
    hooks, what a user's own `checkpoint(f, x, x)` gives to `f` again are two tensors; an `f` that asks whether they are
    one (nn.MultiheadAttention does) then fails with a CheckpointError.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from odc_mpi.shard.units.activity import in_backward
from odc_mpi.shard.units.unit import Unit
from odc_mpi.shard.units.unsharded import UnshardedUnits

#: Pushes the gradients of some parameters of a unit; None for those that were not used.
Push = Callable[[Unit, Sequence[str], Sequence[torch.Tensor | None]], None]


class UnshardedParameters(torch.autograd.Function):
    """Gives a ready unit's parameters a place in the graph, and pushes their gradients from there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, unit: Unit, names: Sequence[str], push: Push) -> Any:
        """Return the whole parameters of these names. One-sided, as a fetch is.

        Args:
            ctx: Autograd's.
            anchor: Any tensor that requires a gradient: without one autograd would leave the node out.
            unit: A ready unit.
            names: Dotted names.
            push: Called in the backward.
        """
        ctx.unit, ctx.names, ctx.push = unit, names, push
        ctx.set_materialize_grads(False)
        tensors = tuple(unit.parameter(name) for name in names)
        frozen = [t for t, name in zip(tensors, names, strict=True) if not unit.ranges[name][1].spec.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        """Push the gradients. One-sided."""
        ctx.push(ctx.unit, ctx.names, gradients)
        return None, None, None, None


class UnitForwards:
    """Hands out parameters: within one call of a unit's forward always the same tensors.

    Args:
        ready: Fetches units.
        push: Pushes gradients.
    """

    def __init__(self, ready: UnshardedUnits, push: Push) -> None:
        self._ready = ready
        self._push = push
        self._anchor = torch.zeros(0, requires_grad=True)
        self._current: dict[Unit, dict[tuple[bool, bool], dict[str, torch.Tensor]]] = {}

    @property
    def suspended(self) -> bool:
        """Whether forwards are no calls of units, as modules hold plain parameters (`shard.materialize`)."""
        return self._ready.is_reshard_forbidden

    @contextmanager
    def run(self, unit: Unit) -> Iterator[None]:
        """Make the enclosed code one call of a unit. Local; parameters are fetched when touched."""
        outer = self._current.get(unit)
        with unit.in_use():
            self._current[unit] = {}
            try:
                yield
            finally:
                # The tensors must go: they keep the buffer alive.
                if outer is None:
                    del self._current[unit]
                else:
                    self._current[unit] = outer
        unit.check_unchanged()
        self._ready.post_forward(unit)

    def parameter(self, unit: Unit, name: str) -> torch.Tensor:
        """Return a whole parameter, fetching its unit if need be. One-sided."""
        calls = self._current.get(unit)
        if calls is None:
            # Touched from outside its unit's forward: a node for this parameter alone.
            return self._tensors(unit, (name,))[name]
        # Tensors made without a graph must not serve code that wants one.
        mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if mode not in calls:
            calls[mode] = self._tensors(unit, tuple(unit.ranges))
        return calls[mode][name]

    def register_backward_hook_for(self, unit: Unit, output: Any) -> None:
        """Have the other ranks told when the backward comes to a call of a unit, by what the call returned.

        Where graphs keep parameters, the backward asks for none, and would be heard of at its end only.
        """
        first = output[0] if isinstance(output, tuple) and output else output
        if (
            self._ready.tensors_stay_valid
            and isinstance(first, torch.Tensor)
            and first.grad_fn is not None
            and not in_backward()
        ):
            first.register_hook(lambda _: self._ready.activity.update("backward of", unit.name))

    def _tensors(self, unit: Unit, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        self._ready.unshard(unit)
        tensors = UnshardedParameters.apply(
            self._anchor, unit, names, partial(self._make_push, self._ready.parameter_version)
        )
        return dict(zip(names, tensors, strict=True))

    def _make_push(self, parameter_version: int, unit: Unit, *gradients: Any) -> None:
        self._ready.check_current(parameter_version)
        self._ready.activity.update("backward of", unit.name)
        self._push(unit, *gradients)


@dataclass(frozen=True, slots=True)
class SavedView:
    """Where a saved tensor looked into a unit."""

    unit: Unit
    array: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    parameter_version: int


class SavedTensorHooks:
    """Saves where parameters are instead of the parameters.

    Args:
        ready: Knows the ready units and fetches them again.
    """

    def __init__(self, ready: UnshardedUnits) -> None:
        self._ready = ready
        self._active = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Save this way in the enclosed forward. Local; does nothing inside itself or a backward, or needlessly."""
        if self._active or self._ready.tensors_stay_valid or in_backward():
            yield
            return
        self._active = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._active = False

    def _pack(self, tensor: torch.Tensor) -> SavedView | tuple[torch.Tensor, int]:
        place = self._ready.find(tensor)
        if place is None:
            # Detached: a saved output that knew its own node would never be freed. The version stands in for
            # autograd's own check against changes in place, which saving through hooks switches off.
            return tensor.detach(), tensor._version
        unit, array = place
        offset = int(tensor.storage_offset())
        return SavedView(
            unit, array, tensor.dtype, offset, tensor.size(), tensor.stride(), self._ready.parameter_version
        )

    def _unpack(self, saved: SavedView | tuple[torch.Tensor, int]) -> torch.Tensor:
        if isinstance(saved, tuple):
            tensor, version = saved
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(tensor.shape)} that the backward needs was changed in place: "
                    f"it is at version {tensor._version}, saved was version {version}"
                )
            return tensor
        self._ready.check_current(saved.parameter_version)
        self._ready.unshard(saved.unit)
        return saved.unit.as_strided(saved.array, saved.dtype, saved.offset, saved.shape, saved.stride)
