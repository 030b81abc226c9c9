"""The seam where the model computes on a device and the shards are on the host.

Shards stay where another transport has them. What is fetched from there comes to the device through pinned memory, and
gradients go the other way:

    fetch   the other transport's fetch, a view of its windows or pinned memory; copy to the device; all done
    push    copy from the device; done; the other transport's push, from pinned memory

The windows themselves are registered with the device's driver, which then copies straight from them, for fetches and
for an optimizer on the device. Where the driver refuses, as it does for small arrays that share a page with another,
the processor copies into pinned memory first.

Both happen where they are waited for: in the threads that fetch and push, beside the computation. A copy begins behind
the mark that the computing thread set when it handed the memory over: a buffer is not overwritten while kernels that
were given before still read it, and a gradient does not leave before the kernels that made it are done. What a wait for
a fetch returns is there, whatever stream then reads it.

The device holds the units in use and nothing else, so a model trains whose shards do not fit on it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.device.device import Device, Mark, Marks
from odc_mpi.comm.transport import Fetch, Layout, Pending, Transport


class StagedTransport(Transport):
    """Another transport's shards, fetched to a device and pushed from there.

    Args:
        host: The other transport; not allocated yet. It belongs to this one.
        device: Where the model computes.
    """

    def __init__(self, host: Transport, device: Device) -> None:
        super().__init__(host.rank, host.size, host.param_dtype, host.reduce_dtype)
        self.name = host.name
        self.threads, self.one_sided = host.threads, host.one_sided
        self.device = device.torch_device
        self.buffers = BufferPool(device.memory)
        # What the host fetches lands in memory that the device can copy from.
        host.buffers = self._pinned = BufferPool(device.pinned)
        self._host = host
        self._device = device
        self._marks = Marks()
        self._registered: dict[int, torch.Tensor] = {}

    @property
    def num_collectives(self) -> int:  # noqa: D102
        return self._host.num_collectives

    def allocate(self, layouts: Sequence[Layout]) -> None:  # noqa: D102
        self.layouts = tuple(layouts)
        self._host.allocate(layouts)
        for memory in self._host.host_memory():
            if self._device.register(memory):
                self._registered[memory.data_ptr()] = memory

    def parameter_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._host.parameter_shard(index)

    def gradient_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._host.gradient_shard(index)

    def memory(self, num_bytes: int) -> torch.Tensor:  # noqa: D102
        return self._device.memory(num_bytes)

    def hand_over(self, memory: torch.Tensor) -> None:  # noqa: D102
        self._marks.set(memory, self._device.mark())

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:  # noqa: D102
        return _StagedFetch(self, self._host.fetch(index), buffer, self._marks.take(buffer))

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        pinned = self._pinned.take(gradient.numel(), self.reduce_dtype)
        copied = self._device.copy(pinned, gradient, self._marks.take(gradient))
        return _StagedPush(self, index, start, pinned, copied)

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:  # noqa: D102
        return self._host.complete_gradients(report)

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:  # noqa: D102
        return self._host.sum_over_ranks(values)

    def publish_parameters(self) -> None:  # noqa: D102
        self._host.publish_parameters()

    def broadcast(self, tensor: torch.Tensor) -> None:  # noqa: D102
        self._host.broadcast(tensor)

    def note(self, what: str, microbatch: int = 0) -> None:  # noqa: D102
        self._host.note(what, microbatch)

    def close(self) -> None:  # noqa: D102
        while self._registered:
            self._device.unregister(self._registered.popitem()[1])
        self._host.close()
        self.buffers.clear()
        self._pinned.clear()

    def _bring(self, fetch: Fetch, buffer: torch.Tensor, after: Mark) -> None:
        """Bring what the host fetches to the device."""
        whole = fetch.wait()
        if self._host.copies or whole.data_ptr() in self._registered:
            self._device.copy(buffer, whole, after).synchronize()
        else:
            # It is the windows' own memory, which the driver did not take: only the processor can copy from it.
            pinned = self._pinned.take(whole.numel(), self.param_dtype)
            pinned.copy_(whole)
            self._device.copy(buffer, pinned, after).synchronize()
            self._pinned.give_back(pinned)
        self._host.release(whole)

    def _send(self, index: int, start: int, pinned: torch.Tensor, copied: Mark) -> None:
        """Push what has come from the device."""
        copied.synchronize()
        self._host.hand_over(pinned)
        self._host.accumulate(index, pinned, start).wait()
        self._pinned.give_back(pinned)


class _StagedFetch:
    """A fetch that goes on to the device."""

    def __init__(self, staged: StagedTransport, fetch: Fetch, buffer: torch.Tensor, after: Mark) -> None:
        self._staged, self._fetch, self._buffer, self._after = staged, fetch, buffer, after

    def wait(self) -> None:
        """Return when all of it is on the device. One-sided, as the host's fetch is."""
        self._staged._bring(self._fetch, self._buffer, self._after)


class _StagedPush:
    """A push that comes from the device."""

    def __init__(self, staged: StagedTransport, index: int, start: int, pinned: torch.Tensor, copied: Mark) -> None:
        self._staged, self._arguments = staged, (index, start, pinned, copied)

    def wait(self) -> None:
        """Return when it has left this rank. One-sided, as the host's push is."""
        self._staged._send(*self._arguments)
