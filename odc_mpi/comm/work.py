"""Handles for asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Work:
    """Handle for a fetch or push. If `operation` is None, the fetch or push is already complete.

    `operation` runs or completes this rank's part, on any thread, and returns the event for a device copy still in
    flight, or None. The handle references `operation`, and thus its buffers, until `operation` has returned.
    """

    def __init__(self, operation: Callable[[], torch.cuda.Event | None] | None = None) -> None:
        self._operation = operation
        self._event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Wait until this rank's part of the operation is complete and its buffers may be used.

        On a GPU, the current stream, not the caller, waits for copies in flight: only kernels enqueued on this stream
        afterwards may use the buffers. Further calls do not repeat the operation unless it raised an exception.
        """
        event = self.complete()
        if isinstance(event, torch.cuda.Event):
            # By default, it would be a stream of the current device.
            event.wait(torch.cuda.current_stream(event.device))
        elif event is not None:
            event.wait()  # of a device in tests

    def complete(self) -> torch.cuda.Event | None:
        """Like `wait`, but return the event for a copy in flight instead of making the current stream wait for it."""
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
