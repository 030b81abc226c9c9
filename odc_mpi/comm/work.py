"""Handles for asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Work:
    """Handle for a fetch or push in flight.

    Args:
        operation: Function that completes the fetch or push. Until it returns, the handle keeps a reference to it and
            thus to its buffers. None means that the fetch or push is already complete.
    """

    def __init__(self, operation: Callable[[], object] | None = None) -> None:
        self._operation = operation

    @property
    def is_done(self) -> bool:
        """True if the operation was complete at construction, or if `wait` has returned."""
        return self._operation is None

    def wait(self) -> None:
        """Wait until this rank's part of the operation is complete and its buffers may be used.

        Further calls do nothing, but if the operation raised an exception, the next call retries it.
        """
        if self._operation is not None:
            self._operation()
            self._operation = None


@dataclass
class FetchWork:
    """Handle for a fetch in flight, with the buffer that it fills."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the fetch and return the full one-dimensional array, without the padding of the last shard."""
        self.work.wait()
        return self.buffer
