"""Handles of asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Work:
    """Handle of a fetch or push in flight.

    Args:
        operation: Function that completes the operation. Until then, the handle references it and its buffers. By
            default, the operation is complete already.
    """

    def __init__(self, operation: Callable[[], object] | None = None) -> None:
        self._operation = operation

    @property
    def is_done(self) -> bool:
        """True if the operation was complete at the start, or `wait` has returned."""
        return self._operation is None

    def wait(self) -> None:
        """Wait until the operation is complete at this rank and its buffers may be used.

        Further calls do nothing, unless the operation failed: they then try again.
        """
        if self._operation is not None:
            self._operation()
            self._operation = None


@dataclass
class FetchWork:
    """Handle of a fetch, and the buffer that it fills."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the fetch, and return the full array, `[numel]` of the dtype of the array."""
        self.work.wait()
        return self.buffer
