"""Phases of a training step, a rank's published activity, and the time, memory and collectives that it uses.

This module does not communicate.

The time of the computing thread is recorded in spans. Communication spans do not overlap each other:

    fetch                  waiting for parameters
    accumulate             starting pushes, and waiting for pushes
    values_gathered, gradients_complete, grad_norm, parameters_published
                           waiting at the synchronization points

Activity spans do not overlap each other, either, but include any communication during the activity:

    generate, rollout_wait generating completions with their rewards, and waiting for other ranks' completions
    optimize, outer_sync   the optimizer step, and synchronizing islands that train separately
    evaluate, save         evaluating, and copying the state for a checkpoint

Sharding spans count only toward the total times:

    windows, weights       allocating the windows, and loading the parameters
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from time import perf_counter
from typing import NamedTuple

import torch

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.transport import Group, Transport

#: Synchronization points of a step, in order: K, A, N and B in docs/ordering.md.
SYNC_POINTS = ("values_gathered", "gradients_complete", "grad_norm", "parameters_published")
ACTIVITIES = ("generate", "rollout_wait", "optimize", "outer_sync", "evaluate", "save")
SHARDING = ("windows", "weights")
#: Kinds of spans, as described in the module docstring.
SPAN_KINDS = ("fetch", "accumulate", *SYNC_POINTS, *ACTIVITIES)


class Span(NamedTuple):
    """Time interval whose `kind` is in `SPAN_KINDS`. Its ends are values of `time.perf_counter`, in seconds."""

    kind: str
    began: float
    ended: float


class SpanRecorder:
    """Recorder for time intervals (spans) in which the computing thread communicates or does something else.

    `seconds` maps each kind of span to the total time of all such spans so far, in seconds.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*SPAN_KINDS, *SHARDING), 0.0)
        self._is_recording = False
        self._recorded: list[Span] = []

    def add(self, kind: str, began: float) -> None:
        """Add a span that began at `began`, a value of `time.perf_counter`, and ends now."""
        ended = perf_counter()
        self.seconds[kind] += ended - began
        if self._is_recording:
            self._recorded.append(Span(kind, began, ended))

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Context manager that adds a span for the enclosed code, even if the code raises an exception."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(kind, began)

    def start_recording(self) -> None:
        """Keep every span from now on. Call `drain` regularly to free the memory of the spans."""
        self._is_recording = True

    def drain(self) -> list[Span]:
        """Remove the spans recorded since the last call, and return them in order."""
        recorded, self._recorded = self._recorded, []
        return recorded


class Usage:
    """Time, memory and synchronization points that this rank has used since the model was constructed."""

    def __init__(self, transport: Transport, spans: SpanRecorder, push_buffers: BufferPool) -> None:
        self._transport, self._spans, self._push_buffers = transport, spans, push_buffers

    @property
    def boundary_wait_s(self) -> float:
        """Total time that this rank has waited at synchronization points, in seconds."""
        return sum(self._spans.seconds[point] for point in SYNC_POINTS)

    @property
    def island_wait_s(self) -> float:
        """The part of `boundary_wait_s` spent waiting in `comm.islands`, in seconds; 0 without islands."""
        return self._transport.island_wait_s

    @property
    def peak_parameter_bytes(self) -> int:
        """Peak memory that this rank has used for parameter shards and fetched units, in bytes."""
        parameters = self._transport.parameters
        return parameters.shard_bytes + self.node_cache_bytes + parameters.buffers.peak_bytes

    @property
    def node_cache_bytes(self) -> int:
        """Size in bytes of this rank's share of the memory in which its node caches fetched units."""
        return self._transport.node_cache_bytes

    @property
    def peak_gradient_bytes(self) -> int:
        """Peak memory that this rank has used for gradient shards, local sums and pushes in flight, in bytes."""
        return self._transport.gradient_shard_bytes + self._push_buffers.peak_bytes

    @property
    def num_collectives(self) -> int:
        """Number of synchronization points so far."""
        return self._transport.group.num_collectives

    @property
    def bytes_between_islands(self) -> int:
        """Bytes of gradients sent to, and parameters received from, other islands per minibatch; 0 without islands."""
        return self._transport.bytes_between_islands


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
