"""Training in every way on the same minibatches: FSDP2, our collectives, our windows, and without communication.

    one round      every contender trains on the same next minibatches, one contender after the other, in an order that
                   goes around; begun together, the slowest rank's end counts
    the ceiling    rank 0 trains on all of them by plain torch while the others sleep: as fast as one process is, by as
                   many as there are ranks

All contenders begin with the same weights, and each keeps its own. Their losses must agree, step by step: a contender
that is fast because it trains something else is found out.
"""

import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

import torch

from odc_mpi.bench.baselines.fsdp import Fsdp
from odc_mpi.bench.baselines.plain import Whole
from odc_mpi.bench.measure import around, ratio
from odc_mpi.data.prepare import prepare
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.spread import Spread
from odc_mpi.train.inputs import open_inputs
from odc_mpi.train.loop import Trainer
from odc_mpi.train.run import build_trainer, decide
from odc_mpi.train.settings import CommConfig, Config, DataConfig, ModelConfig, OptimConfig, load

BASELINE = "fsdp2"
CEILING = "ceiling"
#: transport/balance, all on our runtime.
OURS = ("collective/lb_micro", "window/local_sort", "window/lb_micro", "window/lb_mini", "window/dynamic")
CONTENDERS = (BASELINE, *OURS, CEILING)
#: Losses may differ by so much of the loss: fp32 sums of another order, carried on through the steps; 4e-7 was seen.
TOLERANCE = 1e-5
#: Losses below it are compared as if they were it: rounding in a cross entropy does not shrink with it.
LEAST_LOSS = 1e-2
#: What all contenders do alike, by setting: those in plain torch have no other way.
COMPARABLE = {
    "model.param_dtype": ("float32",),
    "model.reduce_dtype": ("float32",),
    "model.gradient_checkpointing": (False,),
    "run.device": ("cpu",),
    "optim.device": ("cpu",),
    # Every contender is there all the time, and a thread of one would take time from the others, too.
    "comm.progress": ("auto", "off"),
}


#: Where the quick start prepares its data set; the benchmark's own is the same.
DATA = Path("runs/data/stdlib.h5")
MAX_LENGTH = 1024
#: What is trained unless a configuration is given: a Qwen2 of 8 million parameters, a sequence or a few per microbatch.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class Contender(Protocol):
    """A way to train."""

    def step(self) -> tuple[float, int]:
        """Train on the next minibatch; return this rank's part of its loss, and the tokens of all ranks. Collective."""


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


def configuration(world: World, path: Path | None, report: Callable[[str], None]) -> Config:
    """Load the configuration to train. Collective.

    Args:
        world: The ranks.
        path: Of a configuration of `odc-mpi train`; None for `MODEL` on the built-in data set, which is prepared if it
            is not there.
        report: Called with a line on what comes next.

    Raises:
        UserError: As for a run; on every rank.
    """
    if path is None and world.rank == 0 and not DATA.exists():
        report(f"nothing yet: preparing {DATA} first")
        prepare("stdlib", DATA, max_length=MAX_LENGTH)
    world.meet(world.comm.Ibarrier(), "preparing the data set")
    return world.agree(lambda: load(path) if path else own_configuration(world.timeout_s))


def own_configuration(timeout_s: float) -> Config:
    """Return the configuration that is trained unless another one is given. Local."""
    return Config(
        model=ModelConfig(config=MODEL),
        data=DataConfig(path=str(DATA), minibatch_sequences=16, max_tokens_per_microbatch=MAX_LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
        optim=OptimConfig(learning_rate=1e-3),
    )


def measure(
    world: World, config: Config, steps: int, repeats: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Train in every way. Collective.

    Args:
        world: The ranks, all on one node.
        config: Model, data, optimizer and settings of communication; transport and balance are those of each contender.
        steps: Minibatches of a round.
        repeats: Rounds that count; one more comes before them.
        report: Called with a line on what comes next.

    Returns:
        `tokens_per_s`, `quartiles`, `ratio_to_fsdp2`, `ratio_to_ceiling`, each by contender, ratios as medians over
        rounds; `losses` of the first contender and `loss_deviation`, the most by which any other differs; and what it
        was measured on. The same on every rank.

    Raises:
        AgreedError: Settings, data and model do not fit together, or losses differ; on every rank.
    """
    if world.num_nodes > 1:
        raise AgreedError(f"bench train compares on one node, got {world.num_nodes}")
    world.agree(lambda: check_comparable(config))
    before = os.getloadavg()[0]
    torch.set_num_threads(config.run.threads or 1)
    contenders = _Contenders(world, config)
    rounds: dict[str, list[Round]] = {name: [] for name in CONTENDERS}
    for turn in range(repeats + 1):
        for name in around(CONTENDERS, turn):
            report(f"round {turn} of {repeats}: {name}" if turn else f"warming up: {name}")
            rounds[name].append(_round(world, contenders.by_name[name], name, steps))
    contenders.close()
    apart = agreement(rounds, BASELINE, TOLERANCE)
    return {
        "benchmark": "train",
        "repeats": repeats,
        "steps": steps,
        **_figures(world, rounds),
        "loss_deviation": apart,
        **contenders.facts(),
        "load_average": [before, os.getloadavg()[0]],
    }


def check_comparable(config: Config) -> None:
    """Refuse a configuration of which not every contender does the same work. Local.

    Raises:
        UserError: Names the setting.
    """
    for name, expected in COMPARABLE.items():
        section, key = name.split(".")
        given = getattr(getattr(config, section), key)
        if given not in expected:
            *allowed, given = (json.dumps(value).strip('"') for value in (*expected, given))
            raise UserError(f"bench train compares with {name}: {' or '.join(allowed)} only, got {given}: change it")


class _Contenders:
    """All ways to train, each with a model of its own. Making them is collective.

    Args:
        world: The ranks.
        config: See `measure`.
    """

    def __init__(self, world: World, config: Config) -> None:
        self._world, self._config = world, config
        self._fsdp = self._make_fsdp()
        self._decisions = {name: decide(self._with(*name.split("/")), world) for name in OURS}
        self._trainers = {name: self._make_trainer(name) for name in OURS}
        self.by_name: Mapping[str, Contender] = {
            BASELINE: self._fsdp,
            **{name: Ours(trainer, world.rank) for name, trainer in self._trainers.items()},
            CEILING: self._make_ceiling(),
        }

    def facts(self) -> dict[str, Any]:
        """Return the size of the model and the decisions that our contenders run on. Local."""
        shapes = self._trainers[OURS[-1]].model.parameter_shapes().values()
        decision = self._decisions[OURS[-1]]
        return {
            "model_numel": sum(int(torch.Size(shape).numel()) for shape in shapes),
            "reduction": decision.reduction.choice,
            "zero_copy": decision.zero_copy.choice,
            "progress": decision.progress.choice,
        }

    def close(self) -> None:
        """End them. Collective."""
        for trainer in self._trainers.values():
            with trainer:
                trainer.model.close()
        self._fsdp.close()

    def _make_fsdp(self) -> Fsdp:
        config = self._with("window", "lb_micro")
        inputs = self._world.agree(lambda: open_inputs(config, self._world.rank, self._world.size))
        return Fsdp(self._world, config, inputs.loader)

    def _make_trainer(self, name: str) -> Trainer:
        config = self._with(*name.split("/"))
        inputs = self._world.agree(lambda: open_inputs(config, self._world.rank, self._world.size))
        return build_trainer(config, self._world, inputs, self._decisions[name])

    def _make_ceiling(self) -> Contender:
        if self._world.rank:
            return Nothing()
        config = self._with("window", "lb_mini")
        return Whole(config, open_inputs(config, rank=0, size=1).loader)

    def _with(self, transport: str, balance: str) -> Config:
        config = self._config
        return replace(
            config,
            comm=replace(config.comm, transport=cast(Any, transport), progress="off"),
            data=replace(config.data, balance=cast(Any, balance)),
            optim=replace(config.optim, lr_scheduler_type="constant", warmup_steps=0),
        )


class Ours:
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


class Nothing:
    """The contender of the other ranks while the first one trains alone."""

    def step(self) -> tuple[float, int]:
        """Do nothing. Local."""
        return 0.0, 0


def _round(world: World, contender: Contender, name: str, steps: int) -> Round:
    world.meet(world.comm.Ibarrier(), f"beginning {name} together")
    began = perf_counter()
    results = [contender.step() for _ in range(steps)]
    own_s = perf_counter() - began
    world.meet(world.comm.Ibarrier(), f"ending {name}")
    everyone = world.gather_objects((own_s, results))
    losses = [sum(results[i][0] for _, results in everyone) for i in range(steps)]
    num_tokens = sum(tokens for _, tokens in everyone[0][1])
    return Round(max(seconds for seconds, _ in everyone), num_tokens, losses)


def agreement(rounds: Mapping[str, Sequence[Round]], reference: str, tolerance: float) -> dict[str, float]:
    """Return by how much of the reference's losses each contender's differ at most. Local.

    Args:
        rounds: Of every contender.
        reference: One of them.
        tolerance: They may differ by so much.

    Raises:
        AgreedError: They differ by more, or one is no number; on every rank that has the same rounds.
    """
    apart = {name: deviation(own, rounds[reference]) for name, own in rounds.items()}
    worst = max(apart, key=lambda name: apart[name])
    if math.isinf(apart[worst]):
        raise AgreedError(
            f"expected losses that are numbers, got another from {worst} or {reference}: lower optim.learning_rate or "
            "look at the data"
        )
    if apart[worst] > tolerance:
        raise AgreedError(
            f"the losses of {worst} and {reference} differ by {apart[worst]:.2g} of the loss, expected at most "
            f"{tolerance:g}: they do not train the same (a model with dropout cannot be compared; a high "
            "optim.learning_rate lets rounding grow)"
        )
    return apart


def deviation(rounds: Sequence[Round], reference: Sequence[Round]) -> float:
    """Return by how much of the reference's losses others differ at most; without end if one is no number. Local."""
    pairs = [pair for a, b in zip(rounds, reference, strict=True) for pair in zip(a.losses, b.losses, strict=True)]
    return max(_apart(loss, other) for loss, other in pairs)


def _apart(loss: float, reference: float) -> float:
    """Return by how much of the reference a loss differs; without end if one of them is no number."""
    if not (math.isfinite(loss) and math.isfinite(reference)):
        return math.inf
    return abs(loss - reference) / max(abs(reference), LEAST_LOSS)


def _figures(world: World, rounds: Mapping[str, Sequence[Round]]) -> dict[str, Any]:
    """Return speeds and their ratios; the first round was to warm up."""
    seconds, speeds = {}, {}
    for name, all_rounds in rounds.items():
        ranks = world.size if name == CEILING else 1
        seconds[name] = [done.seconds / ranks for done in all_rounds[1:]]
        speeds[name] = [ranks * done.num_tokens / done.seconds for done in all_rounds[1:]]
    spreads = {name: Spread.of(values) for name, values in speeds.items()}
    return {
        "library": world.mpi_library,
        "ranks": world.size,
        "threads": torch.get_num_threads(),
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "quartiles": {name: [spread.low, spread.high] for name, spread in spreads.items()},
        "ratio_to_fsdp2": {name: ratio(seconds[BASELINE], times) for name, times in seconds.items()},
        "ratio_to_ceiling": {name: ratio(seconds[CEILING], times) for name, times in seconds.items()},
        "losses": [loss for done in rounds[BASELINE] for loss in done.losses],
    }
