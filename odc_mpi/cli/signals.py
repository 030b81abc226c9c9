"""Temporary signal handlers. Does not use MPI."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def signals_handled(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals by `handler` in the block, and restore the previous handlers."""
    previous = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler_before in zip(numbers, previous, strict=True):
            signal.signal(number, handler_before)
