"""Compare training with the longest sequences split over ranks and training with unsplit sequences.

    mpiexec -n 2 python benchmarks/split_speed.py [--length 4096 | --length 0] [--sequences 1] [--steps 3] [--rounds 5]

`--length 0` uses functions of Python's standard library unchanged, of 18 tokens and more; other lengths use random
tokens. Both alternate in rounds. Prints tokens per second of both, the median and quartiles of their ratio, and the
simulator's ratio for the same minibatches with the cost that the runs have learned. Collective.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from odc_mpi.bench.contenders import OdcContender, run_rounds
from odc_mpi.bench.train import default_configuration
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.loader import Minibatch
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.prepare import PrepareOptions, prepare
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.simulate.scenario import SimulatedMinibatch
from odc_mpi.simulate.simulate import simulate_timing
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.run import build_trainer, decide
from odc_mpi.training.settings import Config

#: Vocabulary size and number of layers of the model of `default_configuration`.
VOCABULARY, NUM_UNITS = 4096, 8
NUM_SEQUENCES = 256
NAMES = ("dynamic", "split")


def main() -> None:
    """Train with and without splitting and print a line of JSON. Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence; 0: real functions")
    parser.add_argument("--sequences", type=int, default=1, help="sequences of a minibatch, over all ranks")
    parser.add_argument("--steps", type=int, default=3, help="minibatches per round")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one to warm up")
    arguments = parser.parse_args()
    with World() as world:
        torch.set_num_threads(1)
        found = _measure(world, arguments.length, arguments.sequences, arguments.steps, arguments.rounds)
        if world.rank == 0:
            print(json.dumps(found), flush=True)


def _measure(world: World, length: int, sequences: int, steps: int, num_rounds: int) -> dict[str, Any]:
    path = Path(f"runs/data/length_{length}.h5")
    world.run_on_all(lambda: _prepare(path, length) if world.rank == 0 else None)
    recorders = {name: _Recorder() for name in NAMES}
    trainers = {name: _trainer(world, path, sequences, name, recorders[name]) for name in NAMES}
    ours = {name: OdcContender(trainer, world.rank) for name, trainer in trainers.items()}
    rounds = run_rounds(world, ours, steps, num_rounds, lambda line: None)
    # The cost of unsplit sequences is learned in the run without splitting, that of chunks in the other.
    costs = {name: _learned(trainer) for name, trainer in trainers.items()}
    cost = replace(costs["dynamic"], chunk_factor=costs["split"].chunk_factor)
    for trainer in trainers.values():
        with trainer:
            trainer.model.close()
    minibatches = {name: recorder.minibatches[steps:] for name, recorder in recorders.items()}
    whole_s, split_s = (sum(_simulated_s(world.size, own, cost) for own in minibatches[name]) for name in NAMES)
    losses = zip(*([loss for done in rounds[name] for loss in done.losses] for name in NAMES), strict=True)
    seconds = ([done.seconds for done in rounds[name][1:]] for name in NAMES)
    return {
        "ranks": world.size,
        "lengths": [sorted(own.dataset.lengths[own.indices].tolist()) for own in minibatches["split"]],
        "pieces": [len(cut.ranks) for own in minibatches["split"] for cut in own.plan.splits],
        "tokens_per_s": {
            name: quartiles([done.num_tokens / done.seconds for done in own[1:]]) for name, own in rounds.items()
        },
        "ratio": quartiles([whole / split for whole, split in zip(*seconds, strict=True)]),
        "simulated": whole_s / split_s,
        "chunk_factor": cost.chunk_factor,
        "loss_deviation": max(abs(whole - split) / whole for whole, split in losses),
    }


class _Recorder(Callback):
    """Keeps the minibatches."""

    def __init__(self) -> None:
        self.minibatches: list[Minibatch] = []

    def on_step_end(self, step: Step) -> None:
        """Record a minibatch."""
        self.minibatches.append(step.minibatch)


def _learned(trainer: Trainer) -> CostModel:
    return cast(Any, trainer)._source._loader.cost


def _trainer(world: World, path: Path, sequences: int, name: str, recorder: _Recorder) -> Trainer:
    config = default_configuration(world.timeout_s)
    model = cast(Any, config.model.config) | {"max_position_embeddings": 4096}
    data = replace(
        config.data, path=str(path), minibatch_sequences=sequences, max_tokens_per_microbatch=4096, balance="dynamic"
    )
    config = Config(
        model=replace(config.model, config=model),
        data=replace(data, cost="fitted", context_parallel="auto" if name == "split" else "off"),
        comm=config.comm,
        optim=config.optim,
    )
    inputs = world.run_on_all(lambda: open_inputs(config, world.rank, world.size))
    trainer = build_trainer(config, world, inputs, decide(config, world))
    trainer.callbacks.append(recorder)
    return trainer


def _prepare(path: Path, length: int) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not length:
        prepare(["stdlib"], path, PrepareOptions(max_length=4096, vocab_size=VOCABULARY))
        return
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_SEQUENCES, length), dtype=np.uint32)
    with DatasetWriter(path, vocab_size=VOCABULARY, tokenizer="none", source="random") as writer:
        for own in tokens:
            writer.append(own, np.ones(length, dtype=np.bool_))


def _simulated_s(ranks: int, minibatch: Minibatch, cost: CostModel) -> float:
    lengths = minibatch.dataset.lengths[minibatch.indices]
    trial = SimulatedMinibatch(lengths, cost.sequence(lengths), cost.constant, 0.0, np.ones(ranks), cost=cost)
    return simulate_timing(trial, minibatch.plan, "window", num_units=NUM_UNITS).end_s


if __name__ == "__main__":
    main()
