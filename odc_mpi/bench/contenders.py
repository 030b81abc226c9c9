"""Comparison of training implementations, called contenders, for `bench.train` and the studies in `benchmarks/`.

In each round, the contenders take turns training on the same minibatches. The time of a round is that of the slowest
rank. The first round is a warm-up. All contenders start from the same weights, and each trains its own copy. Their
losses must agree at every step, which shows that no contender is faster because it does less work.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from odc_mpi.bench.measure import interleaved, slowest_s
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.runtime.world import World
from odc_mpi.training.loop import Trainer
from odc_mpi.training.settings import Config

#: Minimum divisor for relative differences, because rounding errors in the cross-entropy do not shrink with the loss.
MIN_LOSS = 1e-2


#: Training implementation to compare with others: a function that trains on the next minibatch, at the learning rate
#: `optim.learning_rate`. Collective. It may return before the device has finished the step. Returns this rank's
#: contribution to the loss, and the total number of input tokens on all ranks.
Contender: TypeAlias = Callable[[], tuple[float, int]]


def odc_step(trainer: Trainer, rank: int) -> tuple[float, int]:
    """Run a step of the trainer of `odc-mpi train`. The loss is the full loss on rank 0, and 0.0 elsewhere."""
    metrics = trainer.step()
    return 0.0 if rank else metrics["loss"], metrics["num_input_tokens"]


@dataclass(frozen=True)
class Round:
    """One contender's result for a round: the slowest rank's time, the number of input tokens, and each step's loss."""

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
    """Run all contenders for a warm-up round and `repeats` further rounds of `steps` minibatches each. Collective.

    `report` is called with a line of text before each measurement. `synchronize` must wait until the device is idle.
    Returns the rounds of each contender, beginning with the warm-up. The result is the same on all ranks.
    """
    runs = {name: partial(_round, world, contender, name, steps, synchronize) for name, contender in contenders.items()}
    titles = ["warm-up", *(f"round {number} of {repeats}" for number in range(1, repeats + 1))]
    return interleaved(runs, repeats + 1, lambda number, name: report(f"{titles[number]}: {name}"))


def _round(world: World, contender: Contender, name: str, steps: int, synchronize: Callable[[], object]) -> Round:
    results: list[tuple[float, int]] = []

    def train() -> None:
        results.extend(contender() for _ in range(steps))
        # The device may still run the last optimizer step.
        synchronize()

    synchronize()
    seconds = slowest_s(world, name, train)
    results_of_ranks = world.gather_objects(results)
    losses = [sum(loss for loss, _ in minibatch) for minibatch in zip(*results_of_ranks, strict=True)]
    return Round(seconds, sum(tokens for _, tokens in results_of_ranks[0]), losses)


def agreement(rounds: Mapping[str, Sequence[Round]], reference: str, tolerance: float) -> dict[str, float]:
    """Return, for each contender, the largest relative difference between its losses and those of `reference`.

    `rounds` must be the same on all ranks. Raises `AllRanksUserError` if a difference exceeds `tolerance` or a loss is
    not finite.
    """
    deviations = {name: deviation(of_contender, rounds[reference]) for name, of_contender in rounds.items()}
    worst = max(deviations, key=lambda name: deviations[name])
    if math.isinf(deviations[worst]):
        raise AllRanksUserError(
            f"a loss of {worst} or {reference} is not finite: lower optim.learning_rate or check the data"
        )
    if deviations[worst] > tolerance:
        raise AllRanksUserError(
            f"the losses of {worst} and {reference} differ by {deviations[worst]:.2g} of the loss, expected at most "
            f"{tolerance:g}: they do not train the same. Models with dropout cannot be compared; a high "
            "optim.learning_rate amplifies rounding errors"
        )
    return deviations


def deviation(rounds: Sequence[Round], reference: Sequence[Round]) -> float:
    """Return the largest relative difference between losses and reference losses, or infinity if any is not finite."""
    pairs = [pair for a, b in zip(rounds, reference, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    if not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return math.inf
    return max(abs(loss - other) / max(abs(other), MIN_LOSS) for loss, other in pairs)


def check_comparable(config: Config, comparable: Mapping[str, Sequence[object]], command: str) -> None:
    """Raise `UserError` if a setting has a value that some contenders do not support.

    `comparable` maps setting names, such as `optim.device`, to the supported values. The message names `command`.
    """
    for name, expected in comparable.items():
        section, key = name.split(".")
        actual = getattr(getattr(config, section), key)
        if actual not in expected:
            *allowed, actual = (json.dumps(value).strip('"') for value in (*expected, actual))
            raise UserError(f"{name}: {command} supports only {' or '.join(allowed)}, got {actual}: change the setting")
