"""This rank's slices of the parameters, as tensors for the optimizer.

For each flat array, a rank has the following memory:

    parameter window   [shard of param_dtype]   other ranks fetch from it
    master             [shard of fp32]          only for trainable arrays; the slices are views of the master, and
                                                `write_back` copies it into the window; a window of fp32 or fp64 on the
                                                optimizer's device is its own master
    gradient shard     [shard of reduce_dtype]  sum of the pushes of all ranks; `.grad` of each slice is a view of it,
                                                or of a converted copy if the dtype or device differs
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch
from torch import nn, optim
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout, Slice
from odc_mpi.comm.transport import Group, Transport
from odc_mpi.shard.gradient_format import GradientFormat
from odc_mpi.shard.partition import ParametersByUnit

#: PyTorch optimizers that compute each element's update only from that element's gradients. Other optimizers may need
#: a matrix's rows and columns or a parameter's norm, but a rank has only slices of flattened parameters.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.ASGD,
)
#: Explanations of why other optimizers are not element-wise, by class name.
_UNSUPPORTED_REASONS = {
    "Adafactor": "it factors its second moment over a matrix's rows and columns",
    "Muon": "it orthogonalizes whole matrices",
    "LBFGS": "it takes inner products over all parameters",
    "Lamb": "it scales by the norm of a whole parameter",
    "LARS": "it scales by the norm of a whole parameter",
    "Shampoo": "it preconditions whole matrices",
}


class WeightSource(Protocol):
    """Source from which initial parameter values are read in slices, such as files, random numbers or a module."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements `[start, stop)` of the flattened parameter `name`, in any floating-point dtype.

        Every rank calls this method once for each parameter, in the same order, even if its slice is empty.
        Implementations may therefore be collective.
        """


class ModuleWeightSource(WeightSource):
    """Source that uses rank 0's parameters on all ranks, as `DistributedDataParallel` does. `read` is collective."""

    def __init__(self, parameters_by_unit: ParametersByUnit, group: Group) -> None:
        self._parameters = {name: p for part in parameters_by_unit.values() for name, p in part.items()}
        self._group = group

    @override
    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        full = self._parameters.pop(name).detach().contiguous().cpu()
        self._group.broadcast(full)
        return full.view(-1)[start:stop]


@dataclass
class LocalShard:
    """This rank's slice of a parameter, the tensor that the optimizer updates, and the index of the flat array."""

    slice: Slice
    parameter: nn.Parameter
    index: int


class LocalShards:
    """This rank's slices of all parameters. Slices of trainable parameters are on the optimizer's device.

    Attributes:
        trainable: Slices of the trainable parameters, in layout order. Empty slices are included, so that the list
            covers the same parameters on all ranks.
    """

    def __init__(self, transport: Transport, layouts: Sequence[FlatLayout], device: torch.device) -> None:
        self._transport = transport
        self._layouts = layouts
        # Optimizers need at least fp32. `to` returns the window itself if it already has the right dtype and device.
        self._masters = [
            self._window(i).to(device, torch.promote_types(self._window(i).dtype, torch.float32))
            if layout.trainable
            else self._window(i)
            for i, layout in enumerate(layouts)
        ]
        self._shards = [
            LocalShard(slice_, nn.Parameter(slice_.view(self._masters[i]), layout.trainable), i)
            for i, layout in enumerate(layouts)
            for slice_ in layout.slices(transport.group.rank)
        ]
        self.trainable = [shard for shard in self._shards if shard.parameter.requires_grad]

    @torch.no_grad()
    def load(self, weights: WeightSource) -> None:
        """Read this rank's slices from `weights`. Collective if `weights.read` is. Call `write_back` afterward."""
        for slice_, tensor in self.all_slices():
            tensor.copy_(weights.read(slice_.spec.name, slice_.start, slice_.stop))

    def all_slices(self) -> list[tuple[Slice, torch.Tensor]]:
        """Return this rank's slices of all parameters, including frozen ones, each with a view of its values."""
        return [(shard.slice, shard.parameter.detach()) for shard in self._shards]

    def attach_gradients(self, pushed: Sequence[bool], gradient_format: GradientFormat) -> None:
        """Set the `.grad` of trainable slices to the sums of the pushed gradients. All pushes must be complete.

        Args:
            pushed: For each entry in `trainable`, True if any rank pushed a gradient for the parameter. If False,
                `.grad` stays None, as it does for empty slices.
        """
        by_index: dict[int, torch.Tensor] = {}
        for shard in compress(self.trainable, pushed):
            if shard.slice.numel == 0:
                continue  # an optimizer would spend time and memory on its state
            if shard.index not in by_index:
                # The window itself if it has the right dtype and device; otherwise, a single transfer for all slices in
                # the array. There is no wait for a transfer to a GPU, because the copy in `write_back`, which follows
                # it on the stream, completes before the window is cleared.
                window = self._transport.gradient_shard(shard.index)
                by_index[shard.index] = gradient_format.to_gradients(shard.index, window, shard.parameter)
            shard.parameter.grad = shard.slice.view(by_index[shard.index])

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        """Return the `.grad` tensors of all trainable slices that have one, keyed by the index of the flat array."""
        by_index: dict[int, list[torch.Tensor]] = {}
        for shard in self.trainable:
            if shard.parameter.grad is not None:
                by_index.setdefault(shard.index, []).append(shard.parameter.grad)
        return by_index

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the slices to the memory that other ranks read, and clear the gradients. Call this before publishing.

        The `.grad` of each slice is set to None, because an optimizer's `zero_grad` must not clear the memory to which
        other ranks add the next minibatch's gradients.
        """
        for shard in self.trainable:
            shard.parameter.grad = None
        for i, layout in enumerate(self._layouts):
            if self._masters[i] is not self._window(i):
                self._window(i).copy_(self._masters[i])
            if layout.trainable:
                self._transport.gradient_shard(i).zero_()

    def detach(self) -> None:
        """Copy the trainable slices out of the windows, so that they remain valid after the windows are freed."""
        for shard in self.trainable:
            shard.parameter.data = shard.parameter.data.clone()
            shard.parameter.grad = None
        self.trainable = self._shards = []
        self._masters = []

    def _window(self, i: int) -> torch.Tensor:
        return self._transport.parameter_shard(i)


def require_elementwise(optimizer: optim.Optimizer) -> None:
    """Raise ValueError unless the class of `optimizer` is in `ELEMENTWISE` or `optimizer.elementwise` is True."""
    # Not isinstance, because a subclass need not be element-wise.
    if type(optimizer) in ELEMENTWISE or getattr(optimizer, "elementwise", False):
        return
    name = type(optimizer).__name__
    reason = _UNSUPPORTED_REASONS.get(
        name, "it is not known to be element-wise; if it is, set `elementwise = True` on its class"
    )
    raise ValueError(f"{name} cannot train sharded parameters, because a rank has only flat slices of them: {reason}")
