"""Phase of a sharded model, and this rank's activity, which it publishes for the error messages of other ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from odc_mpi.comm.group import Group


class StepPhase(Enum):
    """Phase of a `ShardedModel`: PUBLISHED -> MINIBATCH -> COMPLETE -> PUBLISHED, and CLOSED at the end."""

    PUBLISHED = "parameters published"
    MINIBATCH = "inside a minibatch"
    COMPLETE = "gradients complete"
    CLOSED = "closed"


def in_backward() -> bool:
    """Return True if the calling thread is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


class ActivityReporter:
    """Reporter that publishes this rank's activity for other ranks to print if they time out waiting for it.

    It publishes, for example:

        in microbatch 3, forward of unit layers.1      a forward pass uses the unit's parameters
        in microbatch 3, fetching unit layers.2        waiting for the owners of the parameters
        in microbatch 3, backward of unit layers.2     a backward pass uses the parameters, or gradients are pushed
        using unit layers.2                            outside microbatches: evaluation, state_dict

    Only changes are published, one or two per forward or backward pass of a unit. Each takes a few microseconds.
    """

    def __init__(self, group: Group) -> None:
        self._set_status = group.world.set_status
        self._last: tuple[str, str] | None = None
        self._override = ""
        self._in_minibatch = False
        self._microbatch = 0

    def start_minibatch(self) -> None:
        """Reset the number of microbatches to 0 and start counting."""
        self._in_minibatch, self._microbatch = True, 0

    def finish_minibatch(self) -> None:
        """Stop counting microbatches. The transport publishes the status at the synchronization points."""
        self._in_minibatch, self._microbatch, self._last = False, 0, None

    def start_microbatch(self) -> None:
        """Count a microbatch if a minibatch is running and `override` is not active."""
        if self._in_minibatch and not self._override:
            self._microbatch += 1
            self._last = None

    @contextmanager
    def override(self, what: str) -> Iterator[Callable[[str], None]]:
        """Context manager that publishes `what` instead of the unit in use. Yields a function that replaces `what`."""
        self._report_override(what)
        try:
            yield self._report_override
        finally:
            self._report_override("")

    def update(self, phase: str, unit: str) -> None:
        """Publish the phase and the unit in use if either has changed since the last call.

        This method does nothing while `override` is active. `phase` is "forward of", "backward of" or "fetching".
        `unit` is "" for the root.
        """
        if not self._override and (phase, unit) != self._last:
            self._last = phase, unit
            if not self._microbatch and phase != "fetching":
                phase = "using"
            self._set_status(f"{phase} unit {unit or '(root)'}", self._microbatch)

    def _report_override(self, what: str) -> None:
        self._override, self._last = what, None
        if what:
            self._set_status(what)
