"""What this rank is doing with which unit, told to the other ranks should they wait for it in vain.

    in microbatch 3, forward of unit layers.1      parameters of the unit are being used in a forward
    in microbatch 3, fetching unit layers.2        it waits for their owners
    in microbatch 3, backward of unit layers.2     they are being used in a backward, or their gradient is pushed
    using unit layers.2                            outside of microbatches: evaluation, state_dict

It tells only what is new: a note or two per call of a unit, a few microseconds each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from odc_mpi.comm.transport import Group


def in_backward() -> bool:
    """Tell whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class ActivityReporter:
    """Tells what this rank is doing.

    Args:
        group: Whose `note` is called.
    """

    def __init__(self, group: Group) -> None:
        self._set_status = group.set_status
        self._last: tuple[str, str] | None = None
        self._override = ""
        self._in_minibatch = False
        self._microbatch = 0

    def start_minibatch(self) -> None:
        """Count microbatches from here on."""
        self._in_minibatch, self._microbatch = True, 0

    def finish_minibatch(self) -> None:
        """Count no more microbatches: the boundary comes, which the transport tells itself."""
        self._in_minibatch, self._microbatch, self._last = False, 0, None

    def start_microbatch(self) -> None:
        """Take a forward of the whole module for the beginning of a microbatch, within a minibatch."""
        if self._in_minibatch and not self._override:
            self._microbatch += 1
            self._last = None

    @contextmanager
    def override(self, what: str) -> Iterator[Callable[[str], None]]:
        """Tell in words what this rank does, and no units meanwhile; yield what tells other words."""
        self._report_override(what)
        try:
            yield self._report_override
        finally:
            self._report_override("")

    def update(self, phase: str, unit: str) -> None:
        """Tell, if it is new, what is done with a unit.

        Args:
            phase: "forward of", "backward of" or "fetching".
            unit: Dotted name; "" for the root.
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
