"""Simulation of GRPO with `rl.max_staleness`, step after step, for `rollout_schedules.py` and `rollout_speed.py`.

The rules are those of `RolloutSource`: ranks claim prompts of the current step, then of later ones, as rows become
free, decode as long as they have rows of the current step, train on finished groups, and otherwise decode ahead.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

#: Decode steps between two looks for finished groups, of a rank that decodes for later steps only.
STEPS_AHEAD = 256


@dataclass
class RolloutWork:
    """Work of a step: lengths in tokens, int64 `[prompts, completions]`, seconds to train each group, ranks' speeds."""

    lengths: npt.NDArray[np.int64]
    train_s: Sequence[float]
    speeds: Sequence[float]


@dataclass
class _Rank:
    at: float = 0.0
    #: Unfinished rows: tokens left, step, prompt.
    rows: list[list[int]] = field(default_factory=list)


class StaleRollouts:
    """Simulation of steps of a `RolloutScenario`. `busy_s` are the seconds that all ranks have decoded and trained."""

    def __init__(self, scenario: Any, steps: Sequence[RolloutWork], max_staleness: int) -> None:
        self._steps, self._max_staleness, self._max_rows = steps, max_staleness, scenario.max_rows
        self._decode_s = scenario.decode_step_s, scenario.decode_sequence_s
        self.busy_s = 0.0
        self._ranks = [_Rank() for _ in steps[0].speeds]
        self._claimed = [0] * len(steps)
        self._left = [dict.fromkeys(range(len(work.lengths)), work.lengths.shape[1]) for work in steps]
        self._published: list[list[tuple[float, int]]] = [[] for _ in steps]

    def step_ends_s(self) -> list[float]:
        """Return the time in seconds at which each step ends."""
        return [self._run(step) for step in range(len(self._steps))]

    def _run(self, step: int) -> float:
        work, num_trained = self._steps[step], 0
        queue = [(rank.at, number) for number, rank in enumerate(self._ranks)]
        heapq.heapify(queue)
        waiting: list[int] = []
        while num_trained < len(work.lengths):
            at, number = heapq.heappop(queue)
            rank = self._ranks[number]
            speed = work.speeds[number]
            self._claim(rank, step)
            works = True
            ready = [each for each in self._published[step] if each[0] <= at]
            if any(row[1] == step for row in rank.rows):
                rank.at = self._decode(rank, at, speed, math.inf)
            elif ready:
                chosen = max(ready, key=lambda each: (int(work.lengths[each[1]].sum()), -each[1]))
                self._published[step].remove(chosen)
                rank.at = at + work.train_s[chosen[1]] / speed
                num_trained += 1
            elif rank.rows:
                rank.at = self._decode(rank, at, speed, STEPS_AHEAD)
            else:
                # Until another rank has done something.
                later = [time for time, _ in queue if time > at] + [time for time, _ in self._published[step]]
                if not later:
                    waiting.append(number)
                    continue
                rank.at, works = max(math.nextafter(at, math.inf), min(later)), False
            self.busy_s += works * (rank.at - at)
            for each in waiting:
                heapq.heappush(queue, (rank.at, each))
            waiting.clear()
            heapq.heappush(queue, (rank.at, number))
        end = max(rank.at for rank in self._ranks)
        for rank in self._ranks:
            rank.at = end
        return end

    def _claim(self, rank: _Rank, step: int) -> None:
        for later in range(step, min(len(self._steps), step + self._max_staleness + 1)):
            lengths = self._steps[later].lengths
            share = math.ceil(len(lengths) / len(self._ranks))
            while self._claimed[later] < len(lengths):
                mine = {row[2] for row in rank.rows if row[1] == later}
                if len(mine) >= share or len(rank.rows) + lengths.shape[1] > self._max_rows:
                    break
                prompt = self._claimed[later]
                self._claimed[later] += 1
                rank.rows += [[int(length), later, prompt] for length in lengths[prompt]]

    def _decode(self, rank: _Rank, at: float, speed: float, most: float) -> float:
        """Decode until a row ends, but at most `most` tokens; return the time at which that is."""
        tokens = int(min(most, min(row[0] for row in rank.rows)))
        constant, each = self._decode_s
        at += tokens * (constant + each * len(rank.rows)) / speed
        for row in rank.rows:
            row[0] -= tokens
        for _, step, prompt in [row for row in rank.rows if not row[0]]:
            self._left[step][prompt] -= 1
            if not self._left[step][prompt]:
                self._published[step].append((at, prompt))
        rank.rows = [row for row in rank.rows if row[0]]
        return at
