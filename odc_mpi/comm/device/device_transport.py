"""The seam where the model computes on a device and the shards are there too, in windows over its memory.

Nothing goes by way of the host: a fetch reads the owners' devices into a buffer on this rank's, and a push leaves from
there. What MPI does and what the device does know nothing of each other, so this says when each may begin:

    fetch     the kernels that read the buffer's old content are done; Gets from the other owners, meanwhile a copy of
              the own part on a stream of its own; a flush, and the mark behind the copy. Then it may be read
    push      the kernels that made the gradient are done; then it is reduced; then its buffer may be written again
    A         as on the host: all pushes are flushed, then all meet. What kernels are given from then on reads the sums
    B         what the owner was having written and cleared is done; then all meet. From then on others read and add

Each wait is for a mark behind what was given at one moment (an event), never for the device; fetches and pushes wait in
the threads that carry them out, beside the computation.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.device.device import Device, Mark, Marks
from odc_mpi.comm.reduce.accumulate import AccumulateReduction, Reduction
from odc_mpi.comm.reduce.device_slots import DeviceSlots
from odc_mpi.comm.reduce.mailbox import DEFAULT_MAILBOX_BYTES, MailboxReduction
from odc_mpi.comm.transport import Layout, Pending
from odc_mpi.comm.windows.device_window import DeviceWindow, by_address
from odc_mpi.comm.windows.rma import Memory, ReadableWindow, Window
from odc_mpi.comm.windows.window import WindowTransport
from odc_mpi.runtime.world import World


class DeviceTransport(WindowTransport):
    """Shards in MPI windows on the memory of a device.

    Args:
        world: The ranks that share every array.
        device: Of this rank; all ranks have one.
        param_dtype: As for any transport.
        reduce_dtype: As for any transport.
        reduction: accumulate or mailbox.
        mailbox_bytes: For a mailbox, memory of the device, as `MailboxReduction` has it.
        progress: Whether a thread serves other ranks while this one computes.
    """

    def __init__(
        self,
        world: World,
        device: Device,
        param_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
        *,
        reduction: str = "accumulate",
        mailbox_bytes: int = DEFAULT_MAILBOX_BYTES,
        progress: bool = False,
    ) -> None:
        make: dict[str, Callable[..., Reduction]] = {
            "accumulate": partial(DeviceAccumulateReduction, device=device),
            "mailbox": partial(
                MailboxReduction, mailbox_bytes=mailbox_bytes, slots=partial(DeviceSlots, device=device)
            ),
        }
        super().__init__(
            world, param_dtype, reduce_dtype, zero_copy=False, reduction=make[reduction], progress=progress
        )
        self.device = device.torch_device
        self._device = device
        world.prepare_threads(device.use)  # what other ranks ask of MPI there may concern the device's memory, too
        self._marks = Marks()
        # Not torch's memory: MPI may have to show it to another process or to a network card.
        self.buffers = BufferPool(device.window_memory)

    def host_memory(self) -> list[torch.Tensor]:  # noqa: D102
        return []

    def memory(self, num_bytes: int) -> torch.Tensor:  # noqa: D102
        return self._device.window_memory(num_bytes)

    def hand_over(self, memory: torch.Tensor) -> None:  # noqa: D102
        self._marks.set(memory, self._device.mark())

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:  # noqa: D102
        return _Later(partial(self._fetch, index, buffer, self._marks.take(buffer)))

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        return _Later(partial(self._push, index, gradient, start, self._marks.take(gradient)))

    def publish_parameters(self) -> None:  # noqa: D102
        self._device.mark().synchronize()
        super().publish_parameters()

    def _fetch(self, index: int, buffer: torch.Tensor, after: Mark) -> None:
        """Fill a buffer, whose old content is of no use to anybody behind the mark. One-sided."""
        self._device.use()
        after.synchronize()
        self._serve()
        layout = self.layouts[index]
        owners = [owner for owner in self._peers if layout.owned(owner)[0] < layout.owned(owner)[1]]
        others = [owner for owner in owners if owner != self.rank]
        pending = self._start_gets(index, others, buffer, by_address(buffer.view(torch.uint8)))
        if self.rank in owners:
            start, stop = layout.owned(self.rank)
            own = self._parameters[index].tensor[: stop - start]
            copied = self._device.copy(buffer[start:stop], own, after)
            pending.wait()
            copied.synchronize()
        else:
            pending.wait()

    def _push(self, index: int, gradient: torch.Tensor, start: int, after: Mark) -> None:
        """Bring a gradient, which is there behind the mark, to its owners. One-sided."""
        self._device.use()
        after.synchronize()
        super().accumulate(index, gradient, start).wait()

    def _make_window(self, numel: int) -> ReadableWindow:
        return DeviceWindow(self._world, numel, self.param_dtype, self._device)

    @property
    def _host_parameter_bytes(self) -> int:
        return 0

    def _begin_thread(self) -> None:
        # MPI libraries ask the driver for the calling thread's device.
        self._device.use()


class DeviceAccumulateReduction(AccumulateReduction):
    """MPI_Accumulate(MPI_SUM) into windows on the owners' devices; owners take no part. Making one is local.

    Args:
        world: The ranks.
        layouts: As for any reduction.
        dtype: As for any reduction.
        device: Has the shards.
    """

    def __init__(self, world: World, layouts: Sequence[Layout], dtype: torch.dtype, device: Device) -> None:
        super().__init__(world, layouts, dtype)
        self._device = device

    @property
    def window_bytes(self) -> int:
        """None of the host's. Local."""
        return 0

    def values(self, gradient: torch.Tensor) -> Memory:  # noqa: D102
        assert gradient.dtype == self.dtype
        return by_address(gradient)

    def _make_window(self, numel: int) -> Window:
        return DeviceWindow(self.world, numel, self.dtype, self._device, same_size=self._per_array == 1)


class _Later:
    """An operation that happens where it is waited for. It keeps the memory that it touches until then."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation: Callable[[], None] | None = operation

    def wait(self) -> None:
        """Carry it out; a second call does nothing. One-sided."""
        operation, self._operation = self._operation, None
        if operation is not None:
            operation()
