"""Compare training with the longest sequences split over ranks and training with unsplit sequences.

    mpiexec -n 2 python benchmarks/split_speed.py [--length 4096] [--sequences 1] [--steps 2] [--repeats 5]

Both train the same minibatches under `dynamic`, in rounds as in `train_speed.py`, with the same losses. Sequences have
`--length` random tokens; with `--length 0`, they are functions of Python's standard library, of 18 tokens and more.

Prints a JSON object with the keys of `measure.header`, and `tokens_per_s` of both as quartiles over rounds; `ratio`,
quartiles of the ratio within a round; `num_cut_sequences`, the number of sequences that were split, out of
`num_sequences`; and `loss_deviation`, the largest relative difference of losses.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Measure, header, run_program
from train_speed import MODEL, TOLERANCE, Round, agreement, default_configuration, run_rounds

from odc_mpi.cli.options import Parser, positive_int
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.prepare import PrepareOptions, prepare
from odc_mpi.errors import UserError
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.run import build_trainer, decide

UNSPLIT, SPLIT = "dynamic", "split"
#: Length of the longest sequence that the model supports.
MAX_LENGTH = 4096
#: Number of random sequences in the data set.
NUM_SEQUENCES = 64


def main() -> int:
    """Measure, let rank 0 print the result, and return the exit code. Collective."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--length", type=int, default=MAX_LENGTH, metavar="N", help="tokens; default: 4096")
    parser.add_argument("--sequences", type=positive_int, default=1, metavar="N", help="of a minibatch; default: 1")
    parser.add_argument("--steps", type=positive_int, default=2, metavar="N", help="minibatches per round; default: 2")
    parser.add_argument("--repeats", type=positive_int, default=5, metavar="N", help="rounds; default: 5")

    def prepare_program(arguments: argparse.Namespace) -> Measure:
        if not 0 <= arguments.length <= MAX_LENGTH:
            raise UserError(f"--length: expected a number from 0 to {MAX_LENGTH}, got {arguments.length}")
        return partial(measure, arguments)

    return run_program(parser, prepare_program)


def measure(arguments: argparse.Namespace, world: World, report: Callable[[str], None]) -> dict[str, Any]:
    """Train with and without splitting, and return the JSON object. Collective."""
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    num_cut = {UNSPLIT: 0, SPLIT: 0}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="odc_mpi-split-"))
        path = Path(world.gather_objects(folder)[0]) / "data.h5"
        world.run_on_all(lambda: None if world.rank else write_data(path, arguments.length))
        trainers = {name: build(world, path, arguments.sequences, name, stack) for name in num_cut}

        def train(name: str) -> tuple[float, int]:
            metrics = trainers[name].step()
            num_cut[name] += metrics.get("num_cut_sequences", 0)
            return 0.0 if world.rank else metrics["loss"], metrics["num_input_tokens"]

        contenders = {name: partial(train, name) for name in trainers}
        rounds = run_rounds(world, contenders, arguments.steps, arguments.repeats, report)
    seconds = {name: [each.seconds for each in of_contender[1:]] for name, of_contender in rounds.items()}
    return {
        **header(world, "split", load, repeats=arguments.repeats, steps=arguments.steps),
        "num_sequences": arguments.sequences * arguments.steps * (arguments.repeats + 1),
        "num_cut_sequences": num_cut[SPLIT],
        "tokens_per_s": {name: _speeds(of_contender) for name, of_contender in rounds.items()},
        "ratio": quartiles([a / b for a, b in zip(seconds[UNSPLIT], seconds[SPLIT], strict=True)]),
        "loss_deviation": agreement(rounds, UNSPLIT, TOLERANCE)[SPLIT],
    }


def _speeds(rounds: Sequence[Round]) -> dict[str, float]:
    return quartiles([each.num_tokens / each.seconds for each in rounds[1:]])


def build(world: World, path: Path, num_sequences: int, name: str, stack: ExitStack) -> Trainer:
    """Return the trainer of a contender, which `stack` closes. Collective."""
    config = default_configuration(world.timeout_s)
    data = replace(config.data, path=str(path), minibatch_sequences=num_sequences, max_tokens_per_microbatch=MAX_LENGTH)
    split = "auto" if name == SPLIT else "off"
    config = replace(
        config,
        model=replace(config.model, config=MODEL | {"max_position_embeddings": MAX_LENGTH}),
        data=replace(data, balance="dynamic", cost="fitted", context_parallel=split),
        optim=replace(config.optim, lr_scheduler_type="constant", warmup_steps=0),
        run=replace(config.run, steps=100),
    )
    inputs = world.run_on_all(lambda: open_inputs(config, world.rank, world.size))
    trainer = build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world)))
    stack.enter_context(trainer)
    stack.callback(trainer.model.close)
    return trainer


def write_data(path: Path, length: int) -> None:
    """Write sequences of `length` random tokens or, if it is 0, functions of the standard library."""
    if not length:
        prepare(["stdlib"], path, PrepareOptions(max_length=MAX_LENGTH, vocab_size=MODEL["vocab_size"]))
        return
    random = np.random.default_rng(0)
    with DatasetWriter(path, vocab_size=MODEL["vocab_size"], tokenizer="none", source="random") as writer:
        for _ in range(NUM_SEQUENCES):
            writer.append(random.integers(MODEL["vocab_size"], size=length, dtype=np.uint32), np.ones(length, np.bool_))


if __name__ == "__main__":
    sys.exit(main())
