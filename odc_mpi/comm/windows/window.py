"""The seam over MPI windows.

Every rank hosts a shard of each flat array in a window: of parameters in a `SharedWindow`, which the ranks of its node
read in place, or in a `Window`, which all read with MPI_Get; of gradients as the reduction has it. The owner takes no
part, or, where the reduction is the mailbox, only as much as adding what has arrived.

    fetch             where all ranks are on one node: a view, nothing moves; else copies from the node's ranks, and a
                      Get from each other owner, then a flush
    push              as the reduction does it
    A                 the reduction is flushed, then all meet (an all-gather), then it is completed: owners may read
    B                 Sync: what owners wrote is in the windows; then all meet (a barrier), then Sync

One window per array: a flush then concerns that array alone.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI

from odc_mpi.comm.ordering import OrderingPoints
from odc_mpi.comm.progress import ProgressThread
from odc_mpi.comm.reduce.accumulate import AccumulateReduction, Reduction
from odc_mpi.comm.transport import Done, Fetch, Layout, Pending, Transport
from odc_mpi.comm.windows.rma import Flush, Memory, ReadableWindow, SharedWindow, Window
from odc_mpi.errors import UserError
from odc_mpi.runtime.world import World

#: MPICH 5.0.2 crashed between 1600 and 3200 windows.
MAX_WINDOWS = 1600


class WindowTransport(Transport):
    """Shards in MPI windows on host memory; `comm.device.device_transport` has those on a device.

    Args:
        world: The ranks that share every array.
        param_dtype: As for any transport.
        reduce_dtype: As for any transport.
        zero_copy: Whether ranks of a node read each other's parameters in place.
        reduction: How gradients reach their owners; made when the arrays are known.
        progress: Whether a thread serves other ranks while this one computes.
    """

    name = "window"

    def __init__(
        self,
        world: World,
        param_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
        *,
        zero_copy: bool = True,
        reduction: Callable[[World, Sequence[Layout], torch.dtype], Reduction] = AccumulateReduction,
        progress: bool = False,
    ) -> None:
        super().__init__(world.rank, world.size, param_dtype, reduce_dtype)
        self._world = world
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._window_type: Callable[[World, int, torch.dtype], ReadableWindow] = SharedWindow if zero_copy else Window
        self._make_reduction = reduction
        self._parameters: list[ReadableWindow] = []
        self._reduction: Reduction | None = None
        self._num_windows = 0
        self._wants_progress = progress
        self._progress: ProgressThread | None = None
        self.copies = True
        # Each rank begins with the next one, so that not all of them ask rank 0 first.
        self._peers = [(world.rank + 1 + i) % world.size for i in range(world.size)]

    def allocate(self, layouts: Sequence[Layout]) -> None:  # noqa: D102
        assert not self.layouts, "a transport allocates once"
        self.layouts = tuple(layouts)
        reduction = self._world.agree(lambda: self._plan_windows(layouts))
        num_bytes = self._host_parameter_bytes + reduction.window_bytes
        self._world.require_shared_memory(num_bytes, "the parameter and gradient windows")
        self._world.on_close(self.close)
        self._world.num_windows += self._num_windows
        self._points = OrderingPoints(self._world, self._serve)
        for layout in layouts:
            self._parameters.append(self._make_window(layout.shard_numel))
        self.copies = any(window.whole is None for window in self._parameters)
        reduction.allocate()
        self._reduction = reduction
        if self._wants_progress:
            self._progress = ProgressThread(self._world, reduction.serve, self._begin_thread)
        # Nobody may push into a window that its owner is still clearing.
        self.publish_parameters()

    def parameter_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._parameters[index].tensor

    def gradient_shard(self, index: int) -> torch.Tensor:  # noqa: D102
        return self._reducing.shard(index)

    def fetch(self, index: int) -> Fetch:  # noqa: D102
        if self.copies:
            return super().fetch(index)
        self._serve()
        whole = self._parameters[index].whole
        assert whole is not None
        return Fetch(whole[: self.layouts[index].numel], Done())

    def release(self, fetched: torch.Tensor) -> None:  # noqa: D102
        if self.copies:
            super().release(fetched)

    def start_fetch(self, index: int, buffer: torch.Tensor) -> Pending:  # noqa: D102
        # Where the reduction leaves owners a part, they do it in passing too.
        self._serve()
        layout, window = self.layouts[index], self._parameters[index]
        owners = [owner for owner in self._peers if layout.owned(owner)[0] < layout.owned(owner)[1]]
        far = [owner for owner in owners if window.near(owner) is None]
        pending = self._start_gets(index, far, buffer, buffer.view(torch.uint8).numpy())
        # While those are on their way:
        for owner in owners:
            near = window.near(owner)
            if near is not None:
                start, stop = layout.owned(owner)
                buffer[start:stop].copy_(near[: stop - start])
        return pending

    def accumulate(self, index: int, gradient: torch.Tensor, start: int = 0) -> Pending:  # noqa: D102
        self._serve()
        return self._reducing.push(index, gradient, start)

    def host_memory(self) -> list[torch.Tensor]:  # noqa: D102
        trained = [index for index, layout in enumerate(self.layouts) if layout.trainable]
        return [
            *(memory for window in self._parameters for memory in window.in_place()),
            *(self._reducing.shard(index) for index in trained),
        ]

    def complete_gradients(self, report: np.ndarray) -> np.ndarray:  # noqa: D102
        self.note("flushing gradients")
        self._reducing.flush()
        self._num_collectives += 1
        reports = self._points.gradients_complete(report)
        self._reducing.complete()
        return reports

    def sum_over_ranks(self, values: np.ndarray) -> np.ndarray:  # noqa: D102
        self._num_collectives += 1
        return self._points.norm(values)

    def publish_parameters(self) -> None:  # noqa: D102
        self._sync()
        self._num_collectives += 1
        self._points.parameters_published()
        self._sync()

    def broadcast(self, tensor: torch.Tensor) -> None:  # noqa: D102
        self._world.broadcast(tensor)

    def note(self, what: str, microbatch: int = 0) -> None:  # noqa: D102
        self._world.note(what, microbatch)

    def close(self) -> None:  # noqa: D102
        if self._reduction is None:
            return
        with self._world.meeting("freeing the windows"):
            if self._progress is not None:
                self._progress.close()
            self._reduction.free()
            for window in reversed(self._parameters):
                window.free()
            self._points.free()
        self._world.num_windows -= self._num_windows
        self._reduction, self._progress, self._parameters = None, None, []
        self.buffers.clear()

    def _start_gets(self, index: int, owners: Sequence[int], buffer: torch.Tensor, memory: Memory) -> Flush:
        """Start to read the parts of these owners into a buffer, whose bytes MPI is given as `memory`."""
        layout, window = self.layouts[index], self._parameters[index]
        what = f"fetching unit {layout.name}"
        with self._world.deadline(what, owners):
            for owner in owners:
                start, stop = layout.owned(owner)
                window.get(owner, memory[start * buffer.itemsize : stop * buffer.itemsize])
        return Flush(self._world, window.flush, what, owners, buffer)

    def _make_window(self, numel: int) -> ReadableWindow:
        return self._window_type(self._world, numel, self.param_dtype)

    @property
    def _host_parameter_bytes(self) -> int:
        """What the parameters take of the host's memory that other ranks can see."""
        return self.parameter_shard_bytes

    def _begin_thread(self) -> None:
        """Prepare a thread, which runs this, for calling MPI."""

    def _plan_windows(self, layouts: Sequence[Layout]) -> Reduction:
        reduction = self._make_reduction(self._world, layouts, self.reduce_dtype)
        shared_apart = self._window_type is SharedWindow and self._world.num_nodes > 1
        number = reduction.num_windows + len(layouts) * (2 if shared_apart else 1)
        held = self._world.num_windows
        if self._world.mpi_library.startswith("MPICH") and held + number > MAX_WINDOWS:
            beside = f", beside {held} of other models" if held else ""
            raise UserError(
                f"units: expected few enough for {MAX_WINDOWS} windows, beyond which MPICH crashes, got {len(layouts)} "
                f"arrays, which take {number}{beside}: choose fewer, larger units, or comm.transport collective"
            )
        self._num_windows = number
        return reduction

    @property
    def _reducing(self) -> Reduction:
        assert self._reduction is not None, "windows are allocated first, and not used after they are freed"
        return self._reduction

    def _serve(self) -> None:
        """Do the owner's part, also of what a progress thread did not come to yet."""
        if self._progress is not None:
            self._progress.check()
        self._reducing.serve()

    def _sync(self) -> None:
        for window in self._parameters:
            window.sync()
        self._reducing.sync()
