"""Status of this rank, published for the error message of a rank that times out waiting for it.

    in microbatch 3, forward of unit layers.1      a forward uses the parameters of the unit
    in microbatch 3, fetching unit layers.2        waiting for the owners of the parameters
    in microbatch 3, backward of unit layers.2     a backward uses the parameters, or their gradient is pushed
    using unit layers.2                            outside of microbatches: evaluation, state_dict

Only changes are published: one or two per forward or backward of a unit, a few microseconds each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from odc_mpi.comm.transport import Group


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class ActivityReporter:
    """Publishes the status of this rank by `Group.set_status`."""

    def __init__(self, group: Group) -> None:
        self._set_status = group.set_status
        self._last: tuple[str, str] | None = None
        self._override = ""
        self._in_minibatch = False
        self._microbatch = 0

    def start_minibatch(self) -> None:
        """Start to count microbatches."""
        self._in_minibatch, self._microbatch = True, 0

    def finish_minibatch(self) -> None:
        """Stop counting microbatches. The transport publishes the status of the synchronization points itself."""
        self._in_minibatch, self._microbatch, self._last = False, 0, None

    def start_microbatch(self) -> None:
        """Count a microbatch: a forward of the root module begins. No effect outside of minibatches."""
        if self._in_minibatch and not self._override:
            self._microbatch += 1
            self._last = None

    @contextmanager
    def override(self, what: str) -> Iterator[Callable[[str], None]]:
        """Publish `what` instead of units in the enclosed code. Yield a function that replaces `what`."""
        self._report_override(what)
        try:
            yield self._report_override
        finally:
            self._report_override("")

    def update(self, phase: str, unit: str) -> None:
        """Publish the use of a unit, "" for the root, if it has changed: "forward of", "backward of" or "fetching"."""
        if not self._override and (phase, unit) != self._last:
            self._last = phase, unit
            if not self._microbatch and phase != "fetching":
                phase = "using"
            self._set_status(f"{phase} unit {unit or '(root)'}", self._microbatch)

    def _report_override(self, what: str) -> None:
        self._override, self._last = what, None
        if what:
            self._set_status(what)
