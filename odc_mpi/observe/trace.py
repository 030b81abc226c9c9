"""Timeline of the last minibatches of a run in ``trace.json``: when each rank computed, fetched, pushed and waited.

Because the clocks of nodes differ, the times of a rank in a minibatch are relative to the end of its previous
minibatch, when all ranks return from the publication of the parameters at about the same time. The timelines of all
ranks are gathered once, at the end of the run. docs/watching.md describes the content of the file.
"""

import json
from collections import deque
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from typing_extensions import override

from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.files import write_or_warn
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.runtime.world import World
from odc_mpi.shard.spans import SPAN_KINDS, Span, SpanRecorder

NAME = "trace.json"
#: Maximum number of spans in the file (a few megabytes). A rank with more spans than its share writes only the longest.
MAX_SPANS = 100_000
#: Number of spans that each rank may write per minibatch, even if the file exceeds `MAX_SPANS`.
MIN_SPANS = 50
#: Number of bins of the histogram `tokens_per_microbatch`.
NUM_BINS = 40


class TraceCallback(Callback):
    """Records the timeline of the last minibatches and writes ``trace.json`` at the end of the run.

    Create the callback right after the model's parameters are published, because the first minibatch begins then. The
    file contains at most `num_steps` minibatches; 0 disables the trace. A microbatch has at most `max_tokens` tokens.
    """

    def __init__(
        self, world: World, run_dir: Path, spans: SpanRecorder, num_steps: int, max_tokens: int, num_islands: int = 1
    ) -> None:
        self._world, self._run_dir, self._spans, self._num_islands = world, run_dir, spans, num_islands
        self._steps: deque[dict[str, Any]] = deque(maxlen=num_steps)
        self._edges = np.linspace(0, max_tokens, NUM_BINS + 1)
        self._counts = np.zeros(NUM_BINS, dtype=np.int64)
        self._first_step: int | None = None
        self._microbatches: list[tuple[float, float, int]] = []
        if num_steps:
            spans.start_recording()
        self._began = perf_counter()

    @override
    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        self._microbatches.append((result.began, result.ended, result.microbatch.num_input_tokens))

    def on_step_end(self, step: Step) -> None:
        """Record a step. Call this right after all ranks have synchronized at the end of the step."""
        origin, self._began = self._began, perf_counter()
        microbatches, self._microbatches = self._microbatches, []
        if not self._steps.maxlen:
            return
        self._first_step = self._first_step or step.number
        self._counts += np.histogram(_tokens(step.minibatch), self._edges)[0]
        recorded = {"end_s": self._began - origin, "origin": origin, "spans": self._spans.drain()}
        self._steps.append({"step": step.number, "microbatches": microbatches, **recorded})

    def on_train_end(self) -> dict[str, Any]:
        """Gather the timelines, and write ``trace.json``. Print a warning if it cannot be written. Collective."""
        if not self._steps:
            return {}
        if spans := self._spans.drain():  # the last checkpoint is saved after its step is recorded
            last = self._steps[-1]
            last["spans"] += spans
            last["end_s"] = max(last["end_s"], spans[-1].ended - last["origin"])
        max_spans = max(MIN_SPANS, MAX_SPANS // (self._world.size * len(self._steps)))
        steps_of_ranks = self._world.gather_objects([_serialize_step(step, max_spans) for step in self._steps])
        if self._world.rank == 0:
            content = {
                "num_islands": self._num_islands,
                "steps": [
                    {"step": step["step"], "ranks": ranks}
                    for step, *ranks in zip(self._steps, *steps_of_ranks, strict=True)
                ],
                "max_tokens_per_microbatch": int(self._edges[-1]),
                "tokens_per_microbatch": {
                    "edges": self._edges.tolist(),
                    "counts": self._counts.tolist(),
                    "first_step": self._first_step,
                    "last_step": self._steps[-1]["step"],
                },
            }
            write_or_warn(self._run_dir / NAME, json.dumps(content) + "\n")
        return {}


def _tokens(minibatch: PlannedMinibatch) -> list[int]:
    """Return the number of tokens in each microbatch of all ranks, including the chunks of split sequences."""
    lengths = minibatch.dataset.lengths[minibatch.indices]
    plan = minibatch.plan
    chunk_lengths = chain.from_iterable(np.diff(split.bounds).tolist() for split in plan.splits)
    return [
        *chunk_lengths,
        *(int(lengths[list(positions)].sum()) for positions in chain(*plan.microbatches, plan.pool) if positions),
    ]


def _serialize_step(step: dict[str, Any], max_spans: int) -> dict[str, Any]:
    """Return this rank's part of a minibatch: times relative to `origin`, and at most the `max_spans` longest spans."""
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
