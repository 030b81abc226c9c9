"""Slices of the parameters that this rank owns, as tensors for the optimizer.

Memory of this rank for a flat array:

    parameter window   [shard of param_dtype]   other ranks fetch it
    master             [shard of fp32]          the slices are views of it, and `write_back` copies it into the window;
                                                it is the window itself if that is fp32 on the optimizer's device
    gradient window    [shard of reduce_dtype]  other ranks add to it; `.grad` of the slices are views of it, or of a
                                                converted copy, as for fixed-point numbers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import nn
from typing_extensions import override

from odc_mpi.comm.transport import Group, Transport
from odc_mpi.shard.gradient_format import GradientFormat
from odc_mpi.shard.layout import FlatLayout, Slice
from odc_mpi.shard.partition import UnitParameters


class WeightSource(Protocol):
    """Source of initial parameters, read in slices: files, random initialization, a module."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a flattened parameter, in any floating-point type.

        Every rank reads every parameter once, also empty slices, in the same order: a source may be collective.
        """


class ModuleWeightSource(WeightSource):
    """Parameters of a module, broadcast from rank 0 as by DistributedDataParallel. `read` is collective."""

    def __init__(self, units: Sequence[UnitParameters], group: Group) -> None:
        self._parameters = {name: p for unit in units for name, p in unit.parameters.items()}
        self._group = group

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        full = self._parameters.pop(name).detach().contiguous().cpu()
        self._group.broadcast(full)
        return full.view(-1)[start:stop]


@dataclass
class LocalShard:
    """Slice of a trainable parameter, its tensor for the optimizer, and the index of its flat array."""

    slice: Slice
    parameter: nn.Parameter
    index: int


class LocalShards:
    """All slices of this rank. Those of trainable parameters are on the device of the optimizer.

    Attributes:
        trainable: Slices in the order of the layouts, including empty ones: the list has equal entries on all ranks.
    """

    def __init__(self, transport: Transport, layouts: Sequence[FlatLayout], device: torch.device) -> None:
        self._transport = transport
        self._layouts = layouts
        # Optimizers need at least fp32. `to` returns the window itself if its dtype and device are right.
        self._masters = [
            self._window(i).to(device, torch.promote_types(self._window(i).dtype, torch.float32))
            if layout.trainable
            else self._window(i)
            for i, layout in enumerate(layouts)
        ]
        self.trainable = [
            LocalShard(slice_, nn.Parameter(_view(self._masters[i], slice_)), i)
            for i, layout in enumerate(layouts)
            if layout.trainable
            for slice_ in layout.slices(transport.group.rank)
        ]

    @torch.no_grad()
    def load(self, weights: WeightSource) -> None:
        """Fill this rank's slices. Collective if `weights.read` is. `write_back` copies them into the windows."""
        for slice_, tensor in self.all_slices():
            tensor.copy_(weights.read(slice_.spec.name, slice_.start, slice_.stop))

    def all_slices(self) -> list[tuple[Slice, torch.Tensor]]:
        """Return this rank's slices of all parameters, including frozen ones, as views of the masters."""
        return [
            (slice_, _view(self._masters[i], slice_))
            for i, layout in enumerate(self._layouts)
            for slice_ in layout.slices(self._transport.group.rank)
        ]

    def attach_gradients(self, pushed: Sequence[bool], gradient_format: GradientFormat) -> None:
        """Set `.grad` to the received gradients, once the gradients are complete.

        If `pushed` is False for an entry of `trainable`, no rank pushed a gradient of it, and `.grad` stays None.
        """
        by_index: dict[int, torch.Tensor] = {}
        for shard in compress(self.trainable, pushed):
            if shard.index not in by_index:
                # The window itself if its dtype and device are right; otherwise one transfer for all slices of the
                # array. A transfer to a GPU is not waited for here: the copy in `write_back`, which follows it on the
                # stream, completes before the window is cleared.
                window = self._transport.gradients.shard(shard.index)
                by_index[shard.index] = gradient_format.to_gradients(shard.index, window, shard.parameter)
            shard.parameter.grad = _view(by_index[shard.index], shard.slice)

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        """Return `.grad` of all slices that have one, by the index of the flat array."""
        by_index: dict[int, list[torch.Tensor]] = {}
        for shard in self.trainable:
            if shard.parameter.grad is not None:
                by_index.setdefault(shard.index, []).append(shard.parameter.grad)
        return by_index

    @torch.no_grad()
    def write_back(self) -> None:
        """Cast the parameters into their windows and clear the gradients, before the parameters are published.

        `.grad` is set to None, because other ranks add to the windows afterwards, and `zero_grad` of an optimizer must
        not clear gradients of the next minibatch.
        """
        for shard in self.trainable:
            shard.parameter.grad = None
        for i, layout in enumerate(self._layouts):
            if self._masters[i] is not self._window(i):
                self._window(i).copy_(self._masters[i])
            if layout.trainable:
                self._transport.gradients.shard(i).zero_()

    def detach(self) -> None:
        """Copy the slices out of the windows, so that they keep their values after the windows are freed."""
        for shard in self.trainable:
            shard.parameter.data = shard.parameter.data.clone()
            shard.parameter.grad = None
        self.trainable = []
        self._masters = []

    def _window(self, i: int) -> torch.Tensor:
        return self._transport.parameters.shard(i)


def _view(shard: torch.Tensor, slice_: Slice) -> torch.Tensor:
    return shard[slice_.offset : slice_.offset + slice_.numel]
