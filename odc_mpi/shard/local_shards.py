"""This rank's own slices: what the optimizer sees, over the memory that the other ranks see.

parameter window   [shard of param_dtype]  others fetch it; where the optimizer can work on it the slices are views of
                                           it: it is in fp32, and on the device where the optimizer works
master             [shard of fp32]         else they are views of this, and `write_back` copies it into the window
gradient window    [shard of reduce_dtype] others add into it; `.grad` of the slices are views of it, or copies, as of
                                           fixed-point numbers
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import nn

from odc_mpi.comm.transport import Group, Transport
from odc_mpi.shard.gradient_format import GradientFormat
from odc_mpi.shard.layout import FlatLayout, Slice
from odc_mpi.shard.partition import UnitParameters


class WeightSource(Protocol):
    """Where initial parameters come from, slice by slice: files, a seeded draw, a module that has them."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of a flattened parameter, in any floating-point type. Local, or collective.

        Every rank reads every parameter once, empty slices too, all in the same order.
        """


class ModuleWeightSource:
    """The parameters of a module that is there: rank 0's count, as with DistributedDataParallel. Reading is collective.

    Args:
        units: Hold the parameters, on any device.
        group: Broadcasts them.
    """

    def __init__(self, units: Sequence[UnitParameters], group: Group) -> None:
        self._parameters = {name: p for unit in units for name, p in unit.parameters.items()}
        self._group = group

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """See `WeightSource`."""
        whole = self._parameters.pop(name).detach().contiguous().cpu()
        self._group.broadcast(whole)
        return whole.view(-1)[start:stop]


@dataclass
class LocalShard:
    """A slice of a trainable parameter, and the index of its flat array."""

    slice: Slice
    parameter: nn.Parameter
    index: int


class LocalShards:
    """All slices of this rank.

    Args:
        transport: Hosts the shards of `layouts`.
        layouts: Of the flat arrays.
        device: Where the optimizer works.

    Attributes:
        trainable: In the order of the layouts; empty slices included, so that all ranks have the same list.
    """

    def __init__(self, transport: Transport, layouts: Sequence[FlatLayout], device: torch.device) -> None:
        self._transport = transport
        self._layouts = layouts
        # Optimizers work in fp32 at least. `to` gives back the window itself where nothing is to be changed.
        self._masters = [
            self._window(i).to(device, torch.promote_types(self._window(i).dtype, torch.float32))
            if layout.trainable
            else self._window(i)
            for i, layout in enumerate(layouts)
        ]
        self.trainable = [
            LocalShard(piece, nn.Parameter(_view(self._masters[i], piece)), i)
            for i, layout in enumerate(layouts)
            if layout.trainable
            for piece in layout.slices(transport.group.rank)
        ]

    @torch.no_grad()
    def load(self, weights: WeightSource) -> None:
        """Fill this rank's slices. Local, or what reading the weights is; `write_back` shows them to others."""
        for piece, own in self.all_slices():
            own.copy_(weights.read(piece.spec.name, piece.start, piece.stop))

    def all_slices(self) -> list[tuple[Slice, torch.Tensor]]:
        """Return this rank's slices of all parameters, frozen ones too, as the optimizer sees them."""
        return [
            (piece, _view(self._masters[i], piece))
            for i, layout in enumerate(self._layouts)
            for piece in layout.slices(self._transport.group.rank)
        ]

    def with_gradient(self, names: Container[str]) -> list[bool]:
        """Return of each of `trainable` whether its parameter is among these."""
        return [own.slice.spec.name in names for own in self.trainable]

    def attach_gradients(self, pushed: Sequence[bool], gradient_format: GradientFormat) -> None:
        """Let `.grad` show what has arrived. Local, after point A.

        Args:
            pushed: Of each of `trainable`, whether any rank pushed a gradient of it; otherwise `.grad` stays None.
            gradient_format: What gradients are added up as.
        """
        arrived: dict[int, torch.Tensor] = {}
        for own in compress(self.trainable, pushed):
            if own.index not in arrived:
                # The window itself where nothing is to be changed; else one transfer for all slices of the array. To a
                # GPU nobody waits for it here: `write_back` does, which copies back behind it before it clears the window.
                window = self._transport.gradients.shard(own.index)
                arrived[own.index] = gradient_format.to_gradients(own.index, window, own.parameter)
            own.parameter.grad = _view(arrived[own.index], own.slice)

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        """Return `.grad` of all slices that have one, by the indices of their arrays."""
        found: dict[int, list[torch.Tensor]] = {}
        for own in self.trainable:
            if own.parameter.grad is not None:
                found.setdefault(own.index, []).append(own.parameter.grad)
        return found

    @torch.no_grad()
    def write_back(self) -> None:
        """Cast the parameters into their windows and clear the gradients. Local, before point B.

        From here on others add to the gradients, so the slices let go of them: an optimizer's `zero_grad` must not
        clear what has arrived for the next minibatch.
        """
        for own in self.trainable:
            own.parameter.grad = None
        for i, layout in enumerate(self._layouts):
            if self._masters[i] is not self._window(i):
                self._window(i).copy_(self._masters[i])
            if layout.trainable:
                self._transport.gradients.shard(i).zero_()

    def detach(self) -> None:
        """Let the slices keep their values when the windows go."""
        for own in self.trainable:
            own.parameter.data = own.parameter.data.clone()
            own.parameter.grad = None
        self.trainable = []
        self._masters = []

    def _window(self, i: int) -> torch.Tensor:
        return self._transport.parameters.shard(i)


def _view(shard: torch.Tensor, slice_: Slice) -> torch.Tensor:
    return shard[slice_.offset : slice_.offset + slice_.numel]
