"""Compare losses of runs whose gradients are added up in fp32 and as fixed-point numbers with those of fp64 sums.

    mpiexec -n 2 python benchmarks/exact_accuracy.py [--steps 500] [--seeds 3] [--config FILE]

Trains the model of `odc-mpi bench train`, or that of a configuration, on the same microbatches in the same order with
each `model.reduce_dtype`, from several seeds. Prints for each seed and type by how much the loss differs from that of
fp64 sums, of the loss: the mean over all steps, the mean over the last tenth, and the most. Collective.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from odc_mpi.bench.train import configuration
from odc_mpi.runtime.world import World
from odc_mpi.train.inputs import open_inputs
from odc_mpi.train.run import build_trainer, decide
from odc_mpi.train.settings import Config


def main() -> None:
    """Train with each type and print a line for each seed and type. Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", type=Path, help="of odc-mpi train")
    arguments = parser.parse_args()
    with World() as world:
        config = configuration(world, arguments.config, print)
        torch.set_num_threads(config.run.threads or 1)
        for seed in range(arguments.seeds):
            losses = {name: _losses(world, config, name, seed, arguments.steps) for name in _TYPES}
            for name in _TYPES[1:]:
                apart = np.abs(losses[name] - losses[_TYPES[0]]) / losses[_TYPES[0]]
                last = apart[-max(1, len(apart) // 10) :]
                if world.rank == 0:
                    figures = f"mean {apart.mean():.3g}, last tenth {last.mean():.3g}, most {apart.max():.3g}"
                    print(f"seed {seed}, {name:8} to float64: {figures}", flush=True)


_TYPES = ("float64", "float32", "fixed64")


def _losses(world: World, config: Config, reduce_dtype: str, seed: int, steps: int) -> np.ndarray:
    config = replace(
        config,
        model=replace(config.model, reduce_dtype=cast(Any, reduce_dtype)),
        run=replace(config.run, seed=seed, steps=steps),
    )
    inputs = world.agree(lambda: open_inputs(config, world.rank, world.size))
    trainer = build_trainer(config, world, inputs, decide(config, world))
    with trainer:
        losses = np.array([trainer.step()["loss"] for _ in range(steps)])
        trainer.model.close()
    return losses


if __name__ == "__main__":
    main()
