"""Ways to train that are compared on the same minibatches, for `bench.train` and studies in `benchmarks/`.

    one round      every contender trains on the same next minibatches, one contender after the other, in an order that
                   goes around; begun together, the slowest rank's end counts; the first round is to warm up

All contenders begin with the same weights, and each keeps its own. Their losses must agree, step by step: a contender
that is fast because it trains something else is found out.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from odc_mpi.bench.measure import interleaved
from odc_mpi.bench.rank_timing import slowest_s
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.runtime.world import World
from odc_mpi.training.loop import Trainer
from odc_mpi.training.settings import Config

#: Losses below it are compared as if they were it: rounding in a cross entropy does not shrink with it.
MIN_LOSS = 1e-2


class Contender(Protocol):
    """A way to train."""

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch; return this rank's part of its loss, and the tokens of all ranks. Collective."""


class OdcContender:
    """Our runtime: the trainer of `odc-mpi train`.

    Args:
        trainer: Steps.
        rank: This one's; the first has all of the loss, which every trainer tells of all ranks.
    """

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self._trainer, self._rank = trainer, rank

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch. Collective."""
        metrics = self._trainer.step()
        return 0.0 if self._rank else metrics["loss"], metrics["num_input_tokens"]


@dataclass(frozen=True)
class Round:
    """Some minibatches in a row.

    Attributes:
        seconds: Until the slowest rank was done.
        num_tokens: That went through the model, over all ranks.
        losses: Of each minibatch.
    """

    seconds: float
    num_tokens: int
    losses: list[float]


def run_rounds(
    world: World,
    contenders: Mapping[str, Contender],
    steps: int,
    repeats: int,
    report: Callable[[str], None],
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, list[Round]]:
    """Train in every way. Collective.

    Args:
        world: The ranks.
        contenders: By name.
        steps: Minibatches of a round.
        repeats: Rounds that count; one more comes before them.
        report: Called with a line on what comes next.
        synchronize: Waits for the device, if there is one.

    Returns:
        The rounds of each contender, the first one included; the same on every rank.
    """
    runs = {name: partial(_round, world, contender, name, steps, synchronize) for name, contender in contenders.items()}
    turns = ["warming up", *(f"round {turn} of {repeats}" for turn in range(1, repeats + 1))]
    return interleaved(runs, repeats + 1, lambda turn, name: report(f"{turns[turn]}: {name}"))


def _round(world: World, contender: Contender, name: str, steps: int, synchronize: Callable[[], object]) -> Round:
    results: list[tuple[float, int]] = []

    def train() -> None:
        results.extend(contender.step() for _ in range(steps))
        # The last optimizer's step may still run, where nothing has asked for what comes of it.
        synchronize()

    synchronize()
    seconds = slowest_s(world, name, train)
    results_of_ranks = world.gather_objects(results)
    losses = [sum(loss for loss, _ in turn) for turn in zip(*results_of_ranks, strict=True)]
    return Round(seconds, sum(tokens for _, tokens in results_of_ranks[0]), losses)


def agreement(rounds: Mapping[str, Sequence[Round]], reference: str, tolerance: float) -> dict[str, float]:
    """Return by how much of the reference's losses each contender's differ at most.

    Raises:
        AgreedError: They differ by more than `tolerance`, or one is no number; on every rank that has the same rounds.
    """
    deviations = {
        name: deviation(rounds_of_contender, rounds[reference]) for name, rounds_of_contender in rounds.items()
    }
    worst = max(deviations, key=lambda name: deviations[name])
    if math.isinf(deviations[worst]):
        raise AllRanksUserError(
            f"expected losses that are numbers, got another from {worst} or {reference}: lower optim.learning_rate or "
            "look at the data"
        )
    if deviations[worst] > tolerance:
        raise AllRanksUserError(
            f"the losses of {worst} and {reference} differ by {deviations[worst]:.2g} of the loss, expected at most "
            f"{tolerance:g}: they do not train the same (a model with dropout cannot be compared; a high "
            "optim.learning_rate lets rounding grow)"
        )
    return deviations


def deviation(rounds: Sequence[Round], reference: Sequence[Round]) -> float:
    """Return by how much of the reference's losses others differ at most; without end if one is no number."""
    pairs = [pair for a, b in zip(rounds, reference, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.inf
    return max(abs(loss - other) / max(abs(other), MIN_LOSS) for loss, other in pairs)


def check_comparable(config: Config, comparable: Mapping[str, Sequence[object]], command: str) -> None:
    """Refuse a configuration of which not every contender does the same work.

    Args:
        config: Of a run.
        comparable: The values that a setting may have, by its name.
        command: For the message.

    Raises:
        UserError: Names the setting.
    """
    for name, expected in comparable.items():
        section, key = name.split(".")
        actual = getattr(getattr(config, section), key)
        if actual not in expected:
            *allowed, actual = (json.dumps(value).strip('"') for value in (*expected, actual))
            raise UserError(f"{command} compares with {name}: {' or '.join(allowed)} only, got {actual}: change it")
