"""Handles of asynchronous fetches and pushes, similar to `torch.distributed.Work`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Work(Protocol):
    """Handle of a fetch or push in flight."""

    def wait(self) -> None:
        """Block until the operation is complete at this rank. One-sided. Its buffers may be used afterwards."""


class CompletedWork:
    """Handle of an operation that was complete when it was started."""

    def wait(self) -> None:
        """Return immediately."""


class DeferredWork:
    """Handle of an operation that is completed by a function, which `wait` calls.

    Args:
        operation: Function that completes the operation. Until then, the handle references it and its buffers.
    """

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation: Callable[[], None] | None = operation

    @property
    def is_done(self) -> bool:
        """True if `wait` has been called."""
        return self._operation is None

    def wait(self) -> None:
        """Complete the operation. One-sided. Further calls do nothing."""
        operation, self._operation = self._operation, None
        if operation is not None:
            operation()


@dataclass
class FetchWork:
    """Handle of a fetch, and the buffer that it fills."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Wait for the fetch, and return the full array, `[numel]` of the dtype of the array. One-sided."""
        self.work.wait()
        return self.buffer
