"""When each rank computed, fetched, pushed and waited: the last minibatches of a run, as ``trace.json``.

Clocks of different nodes differ, so a rank's times count from when it left point B before the minibatch: all leave it
about together. While a run goes nothing is communicated; at its end everything is gathered once.

    steps                     a list, the oldest first, of
        step                  counted from 1
        ranks                 for each rank: `end_s`, when it left B; `microbatches`, a list of [began_s, ended_s,
                              tokens]; for each kind of `shard.step_phases` a list of [began_s, ended_s];
                              `left_out_s`, seconds by kind of spans that were too short to be kept
    max_tokens_per_microbatch
    tokens_per_microbatch     over all ranks and all steps since the run began or went on, `first_step` to `last_step`:
                              `counts` between `edges`
"""

import json
from collections import deque
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from odc_mpi.data.loader import Minibatch
from odc_mpi.files import write_or_warn
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.runtime.world import World
from odc_mpi.shard.step_phases import SPAN_KINDS, Span, SpanRecorder

NAME = "trace.json"
#: Spans in the file, over all ranks and minibatches: a few megabytes. Of more than its part a rank keeps the longest.
MAX_SPANS = 100_000
#: A rank keeps at least so many of a minibatch.
MIN_SPANS = 50
#: Bars of the histogram.
NUM_BINS = 40


class TraceCallback(Callback):
    """Keeps what this rank did in the last minibatches, and writes it at the end.

    Args:
        world: The ranks.
        run_dir: Where the file is to be.
        spans: Those of the model, which has just left B.
        num_steps: How many minibatches to keep; 0: nothing is kept or written.
        max_tokens: The most in a microbatch.
    """

    def __init__(self, world: World, run_dir: Path, spans: SpanRecorder, num_steps: int, max_tokens: int) -> None:
        self._world, self._run_dir = world, run_dir
        self._spans = spans
        self._steps: deque[dict[str, Any]] = deque(maxlen=num_steps)
        self._edges = np.linspace(0, max_tokens, NUM_BINS + 1)
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._first_step: int | None = None
        self._microbatches: list[tuple[float, float, int]] = []
        if num_steps:
            spans.start_recording()
        self._began = perf_counter()

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Take a microbatch."""
        self._microbatches.append((result.began, result.ended, result.microbatch.num_input_tokens))

    def on_step_end(self, step: Step) -> None:
        """Take what happened since the last call; this rank has just left B."""
        origin, self._began = self._began, perf_counter()
        microbatches, self._microbatches = self._microbatches, []
        if not self._steps.maxlen:
            return
        self._first_step = self._first_step or step.number
        self._counts += np.histogram(_tokens(step.minibatch), self._edges)[0]
        recorded = {"end_s": self._began - origin, "origin": origin, "spans": self._spans.drain()}
        self._steps.append({"step": step.number, "microbatches": microbatches, **recorded})

    def on_train_end(self) -> dict[str, Any]:
        """Write the file of all ranks, or warn that it cannot be written. Collective."""
        if self._steps:
            self._write()
        return {}

    def _write(self) -> None:
        max_spans = max(MIN_SPANS, MAX_SPANS // (self._world.size * len(self._steps)))
        steps_of_ranks = self._world.gather_objects([_serialize_step(step, max_spans) for step in self._steps])
        if self._world.rank == 0:
            numbers = [step["step"] for step in self._steps]
            steps = [
                {"step": n, "ranks": list(ranks)}
                for n, ranks in zip(numbers, zip(*steps_of_ranks, strict=True), strict=True)
            ]
            tokens = {"edges": self._edges.tolist(), "counts": self._counts.tolist()}
            tokens |= {"first_step": self._first_step, "last_step": numbers[-1]}
            most_tokens = int(self._edges[-1])
            content = {"steps": steps, "max_tokens_per_microbatch": most_tokens, "tokens_per_microbatch": tokens}
            write_or_warn(self._run_dir / NAME, json.dumps(content) + "\n")


def _tokens(minibatch: Minibatch) -> list[int]:
    """Return the tokens of every microbatch of all ranks."""
    lengths = minibatch.dataset.lengths[minibatch.indices]
    plan = minibatch.plan
    chunk_lengths = chain.from_iterable(np.diff(split.bounds).tolist() for split in plan.splits)
    return [
        *chunk_lengths,
        *(int(lengths[list(positions)].sum()) for positions in chain(*plan.microbatches, plan.pool) if positions),
    ]


def _serialize_step(step: dict[str, Any], max_spans: int) -> dict[str, Any]:
    """Return a rank's minibatch with times from its origin, and the longest spans only if there are too many."""
    origin: float = step["origin"]
    spans: list[Span] = step["spans"]
    limit = sorted((s.ended - s.began for s in spans), reverse=True)[max_spans] if len(spans) > max_spans else -1.0
    serialized: dict[str, Any] = {kind: [] for kind in SPAN_KINDS}
    left_out_s = dict.fromkeys(SPAN_KINDS, 0.0)
    for kind, began, ended in spans:
        if ended - began > limit:
            serialized[kind].append([round(began - origin, 6), round(ended - origin, 6)])
        else:
            left_out_s[kind] += ended - began
    microbatches = [[round(began - origin, 6), round(ended - origin, 6), n] for began, ended, n in step["microbatches"]]
    return {"end_s": round(step["end_s"], 6), "microbatches": microbatches, **serialized, "left_out_s": left_out_s}
