"""Handles of asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


class Work:
    """Handle of a fetch or push in flight.

    Args:
        operation: Function that completes the fetch or push. The handle references the function, and thus its buffers,
            until the function has returned. If None, the fetch or push is already complete.
    """

    def __init__(self, operation: Callable[[], object] | None = None) -> None:
        self._operation = operation

    @property
    def is_done(self) -> bool:
        """True if the operation was complete at construction, or if `wait` has returned."""
        return self._operation is None

    def wait(self) -> None:
        """Wait until the operation is complete at this rank and its buffers may be used.

        Further calls do nothing. If the operation raised an error, the next call runs it again.
        """
        if self._operation is not None:
            self._operation()
            self._operation = None


@dataclass
class FetchWork:
    """Handle of a fetch, and the buffer that the fetch fills."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the fetch, and return the full array, `[numel]` of the dtype of the array."""
        self.work.wait()
        return self.buffer
