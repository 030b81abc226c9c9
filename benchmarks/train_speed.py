"""Compare the training speed of FSDP2, odc_mpi and unsharded training, which are called contenders.

    mpiexec -n 2 python benchmarks/train_speed.py [--config FILE] [--steps 4] [--repeats 7] [--exact] [--json]

All ranks must be on one node. By default, they train a small model on the data set of the quick start.

In each round, the contenders take turns training on the same minibatches, and the time of the slowest rank counts. The
first round is a warm-up. All contenders start from the same weights, and each trains its own copy. Their losses must
agree at every step, which shows that no contender is faster because it does less work. Other programs use the same
rounds.

For the contender `ceiling`, rank 0 trains on all sequences in plain PyTorch while the other ranks are idle. The ceiling
is the speed of rank 0 multiplied by the number of ranks. `--exact` also measures windows with `run.exact`.

The JSON object has, by contender, `tokens_per_s`, its `quartiles`, `ratio_to_fsdp2`, `ratio_to_ceiling` and
`loss_deviation`, the largest relative difference from the losses of FSDP2, which are in `losses`. The other keys are
those of `measure.header` and of `_Contenders.describe`.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from baselines import FSDPBaseline, UnshardedBaseline, gloo_process_group
from measure import Measure, header, interleaved, ratio, run_program, slowest_s

from odc_mpi.cli.options import Parser, as_path, positive_int
from odc_mpi.comm.settings import CommConfig
from odc_mpi.data.prepare import PrepareOptions, prepare
from odc_mpi.errors import AllRanksUserError, UserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.context import RunContext
from odc_mpi.training.exact import apply_exact_settings
from odc_mpi.training.inputs import Inputs, open_inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.settings import Config, DataConfig, ModelConfig, OptimConfig, RunConfig, load
from odc_mpi.training.start.resolved_settings import resolve_settings, with_device

BASELINE = "fsdp2"
#: FSDP2 with the `lb_mini` plan, and dummies on ranks with fewer microbatches: the baseline in AMD's port of ODC.
PADDED = "fsdp2/lb_mini"
CEILING = "ceiling"
#: Name of the `dynamic` balance with context parallelism for the longest sequences.
SPLIT = "split"
#: Contenders that use odc_mpi.
OURS = ("window/local_sort", "window/lb_micro", "window/lb_mini", "window/dynamic", f"window/{SPLIT}")
#: Optional contenders, which use windows with `run.exact`.
EXACT = ("exact/lb_mini", "exact/dynamic")
CONTENDERS = (BASELINE, PADDED, *OURS, CEILING)
#: Maximum relative difference between losses. Summing fp32 values in a different order caused differences of 4e-7.
TOLERANCE = 1e-5
#: Minimum divisor for relative differences, because rounding errors in the cross-entropy do not shrink with the loss.
MIN_LOSS = 1e-2
#: Values of settings that all contenders support, including plain PyTorch.
COMPARABLE = {
    "model.param_dtype": ("float32",),
    "model.reduce_dtype": ("float32",),
    "model.gradient_checkpointing": (False,),
    "model.compile": (False,),
    "run.device": ("cpu",),
    "optim.device": ("cpu",),
    # All contenders exist at the same time, and the progress thread of one contender would slow down the others.
    "comm.progress": ("auto", "off"),
}

#: Default data set, which the quick start uses, too.
DATA = Path("runs/data/stdlib.h5")
MAX_LENGTH = 1024
#: Default model, with 8 million parameters.
MODEL: dict[str, Any] = {
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

#: Training implementation to compare with others: a function that trains on the next minibatch, at the learning rate
#: `optim.learning_rate`. Collective. It may return before the device has finished the step. Returns this rank's
#: contribution to the loss, and the total number of input tokens on all ranks.
Contender: TypeAlias = Callable[[], tuple[float, int]]


def main() -> int:
    """Measure, let rank 0 print the result, and return the exit code. Collective."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=as_path, metavar="FILE", help="as for odc-mpi train; default: a small model")
    parser.add_argument("--steps", type=positive_int, default=4, metavar="N", help="minibatches per round; default: 4")
    parser.add_argument("--repeats", type=positive_int, default=7, metavar="N", help="rounds; default: 7")
    parser.add_argument("--exact", action="store_true", help="measure the cost of run.exact, too")

    def prepare(arguments: argparse.Namespace) -> Measure:
        def measure_on(world: World, report: Callable[[str], None]) -> dict[str, Any]:
            config = configuration(world, arguments.config, report)
            return measure(world, config, arguments.steps, arguments.repeats, report, exact=arguments.exact)

        return measure_on

    return run_program(parser, prepare)


def configuration(world: World, path: Path | None, report: Callable[[str], None]) -> Config:
    """Load the configuration in the file `path`, or the default configuration if `path` is None. Collective.

    With the default configuration, rank 0 prepares the default data set if it does not exist yet, and first calls
    `report` with a line of text. The configuration always uses the CPU, and `run.steps` defaults to 100.
    """
    if path is None and world.rank == 0 and not DATA.exists():
        report(f"starts after {DATA} is prepared")
        prepare(["stdlib"], DATA, PrepareOptions(max_length=MAX_LENGTH))
    world.wait_collective(world.comm.Ibarrier(), "preparing the data set")
    config = world.run_on_all(lambda: load(path) if path else default_configuration(world.timeout_s))
    config, _ = resolve_settings(with_device(config, "cpu"), world)
    if not config.run.steps:  # epochs: the learning rate depends on the number of steps
        config = replace(config, run=replace(config.run, steps=100))
    return config


def default_configuration(timeout_s: float) -> Config:
    """Return the configuration that is used if `--config` is not given."""
    return Config(
        model=ModelConfig(config=MODEL, param_dtype="float32"),
        data=DataConfig(path=str(DATA), minibatch_sequences=16, max_tokens_per_microbatch=MAX_LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
        optim=OptimConfig(learning_rate=1e-3),
        run=RunConfig(device="cpu"),
    )


def measure(
    world: World,
    config: Config,
    steps: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
    *,
    exact: bool = False,
) -> dict[str, Any]:
    """Measure the training speed of all contenders on one node. Collective.

    After a warm-up, `repeats` rounds of `steps` minibatches follow. If `exact`, contenders in `EXACT` also take part.
    Raises `AllRanksUserError` if there are several nodes, a setting or an input is invalid, or the losses do not agree.

    Returns:
        JSON object. For each contender, it contains the median and the quartiles of `tokens_per_s`, the median relative
        speeds, and `loss_deviation`, the maximum relative difference from the losses of FSDP2, which are in `losses`.
    """
    if world.num_nodes > 1:
        raise AllRanksUserError(f"train_speed.py compares on one node, got {world.num_nodes}")
    world.run_on_all(lambda: check_comparable(config, COMPARABLE, "train_speed.py"))
    before = os.getloadavg()[0]
    torch.set_num_threads(config.run.threads or 1)
    contenders = _Contenders(world, config, (*OURS, *EXACT) if exact else OURS)
    rounds = run_rounds(world, contenders.by_name, steps, repeats, report)
    contenders.close()
    deviations = agreement(rounds, BASELINE, TOLERANCE)
    return {
        **header(world, "train", before, repeats=repeats, steps=steps, threads=torch.get_num_threads()),
        **_figures(rounds, world.size),
        "loss_deviation": deviations,
        **contenders.describe(),
    }


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


class _Contenders:
    def __init__(self, world: World, config: Config, ours: Sequence[str]) -> None:
        self._world, self._config = world, config
        self._closing = ExitStack()
        self._closing.enter_context(gloo_process_group(world))
        configs = {name: self._configure(*name.split("/")) for name in ours}
        decisions = {name: decide(contender_config, world) for name, contender_config in configs.items()}
        trainers = {
            name: build_trainer(RunContext(each, world, inputs=self._inputs(each), decision=decisions[name]))
            for name, each in configs.items()
        }
        for trainer in trainers.values():
            self._closing.enter_context(trainer)
            self._closing.callback(trainer.model.close)
        self._decision, self._model = decisions[OURS[-1]], trainers[OURS[-1]].model
        self.by_name: Mapping[str, Contender] = {
            BASELINE: self._fsdp(self._configure("window", "lb_micro")),  # equal numbers of microbatches
            PADDED: self._fsdp(self._configure("window", "lb_mini")),
            **{name: partial(odc_step, trainer, world.rank) for name, trainer in trainers.items()},
            CEILING: idle if world.rank else self._unsharded(),
        }

    def describe(self) -> dict[str, Any]:
        """Describe the model, and the communication of the contenders over windows."""
        return {
            "model_numel": sum(map(math.prod, self._model.parameter_shapes().values())),
            "reduction": self._decision.reduction.value,
            "zero_copy": self._decision.zero_copy.value,
            "progress": self._decision.progress.value,
            "parameter_cache_bytes": self._model.cache_bytes.parameters,
            "gradient_cache_bytes": self._model.cache_bytes.gradients,
        }

    def close(self) -> None:
        """Close all contenders. Collective."""
        self._closing.close()

    def _inputs(self, config: Config) -> Inputs:
        return self._world.run_on_all(lambda: open_inputs(config, self._world.rank, self._world.size))

    def _fsdp(self, config: Config) -> Contender:
        return FSDPBaseline(self._world, config, self._inputs(config).sequence_loader).step

    def _unsharded(self) -> Contender:
        config = self._configure("window", "lb_mini")
        return UnshardedBaseline(config, open_inputs(config, 0, 1).sequence_loader).step

    def _configure(self, kind: str, balance: str) -> Config:
        config, is_split = self._config, balance == SPLIT
        data = replace(config.data, balance=cast(Any, "dynamic" if is_split else balance), eval_path=None)
        return apply_exact_settings(
            replace(
                config,
                comm=replace(config.comm, progress="off"),
                data=replace(data, context_parallel="auto" if is_split else "off"),
                optim=replace(config.optim, lr_scheduler_type="constant", warmup_steps=0),
                run=replace(config.run, exact=kind == "exact"),
            )
        )


def idle() -> tuple[float, int]:
    """Do nothing while rank 0 measures the ceiling."""
    return 0.0, 0


def _figures(rounds: Mapping[str, Sequence[Round]], num_ranks: int) -> dict[str, Any]:
    """Return the speeds and relative speeds of all contenders, excluding the warm-up, and the losses of FSDP2."""
    ranks = {name: num_ranks if name == CEILING else 1 for name in rounds}
    seconds = {name: [each.seconds / ranks[name] for each in of_contender[1:]] for name, of_contender in rounds.items()}
    spreads = {
        name: quartiles([ranks[name] * each.num_tokens / each.seconds for each in of_contender[1:]])
        for name, of_contender in rounds.items()
    }
    return {
        "tokens_per_s": {name: spread["median"] for name, spread in spreads.items()},
        "quartiles": {name: [spread["low"], spread["high"]] for name, spread in spreads.items()},
        **{
            f"ratio_to_{reference}": {name: ratio(seconds[reference], times) for name, times in seconds.items()}
            for reference in (BASELINE, CEILING)
        },
        "losses": [loss for each in rounds[BASELINE] for loss in each.losses],
    }


if __name__ == "__main__":
    sys.exit(main())
