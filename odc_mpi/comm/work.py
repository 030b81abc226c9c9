"""Fetches and pushes on their way: what a store returns, and whoever started it waits for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Work(Protocol):
    """A fetch or push on its way."""

    def wait(self) -> None:
        """Return once the operation is complete at this end. One-sided."""


class CompletedWork:
    """An operation that was complete when it was started."""

    def wait(self) -> None:
        """Return at once."""


class DeferredWork:
    """An operation that happens where it is waited for. It keeps the memory that it touches until then."""

    def __init__(self, operation: Callable[[], None]) -> None:
        self._operation: Callable[[], None] | None = operation

    @property
    def is_done(self) -> bool:
        """Whether the operation was waited for."""
        return self._operation is None

    def wait(self) -> None:
        """Carry it out; a second call does nothing. One-sided."""
        operation, self._operation = self._operation, None
        if operation is not None:
            operation()


@dataclass
class FetchWork:
    """A fetch on its way."""

    buffer: torch.Tensor
    work: Work

    def wait(self) -> torch.Tensor:
        """Return the whole array, `[numel]` of the store's `dtype`, once it is there. One-sided."""
        self.work.wait()
        return self.buffer
