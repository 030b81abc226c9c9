"""Handles for asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Work:
    """Handle for a fetch or push in flight.

    Args:
        operation: Function that completes this rank's part of the operation, on any thread. If a device is then still
            copying, the function returns the event of the copy, otherwise None. Until it returns, the handle keeps a
            reference to it and thus to its buffers. None means that the fetch or push is already complete.
    """

    def __init__(self, operation: Callable[[], torch.cuda.Event | None] | None = None) -> None:
        self._operation = operation
        self._event: torch.cuda.Event | None = None

    @property
    def is_done(self) -> bool:
        """True if the operation was complete at construction, or if `wait` has returned."""
        return self._operation is None

    def wait(self) -> None:
        """Wait until this rank's part of the operation is complete and its buffers may be used.

        On a GPU, only kernels that are later enqueued on the current stream may use the buffers: the stream waits for
        copies in flight, not the caller. Further calls do nothing, but if the operation raised an exception, the next
        call retries it.
        """
        if (event := self.complete()) is not None:
            event.wait()

    def complete(self) -> torch.cuda.Event | None:
        """Do as `wait`, but return the event of a copy in flight instead of making the current stream wait for it."""
        if self._operation is not None:
            self._event = self._operation()
            self._operation = None
        return self._event


@dataclass
class FetchWork:
    """Handle for a fetch in flight, with the buffer that it fills."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the fetch and return the full one-dimensional array, without the padding of the last shard."""
        self.work.wait()
        return self.buffer
