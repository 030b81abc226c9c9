"""Several ranks that share a GPU: training compared with processes that exchange nothing, on the same minibatches.

    plain            each rank `gpu_step.Plain` on its share of the microbatches
    independent      each rank `odc-mpi train` as a job of one rank on the same share, shards in place on the GPU
    host_windows     `odc-mpi train` on all ranks, shards on the host
    device_windows   the same, shards on the GPU

`plain` and `independent` keep the full model in each process, and do not communicate. Their models would
drift apart: with a learning rate of 0 the optimizer has the same work, and all contenders have the same loss at each
step. Processes take turns on a GPU, unless its multi-process service (MPS) runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu_step import COMM, DEVICE, PLAIN, Contenders, run

from odc_mpi.comm.device.device import Device
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config

INDEPENDENT = "independent"
#: Layers of `gpu_step.MODEL`: 307 million parameters, so that each rank can hold two models and their optimizers.
LAYERS = 5


def measure(
    world: World,
    config: Config,
    device: Device,
    names: Sequence[str],
    steps: int,
    repeats: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train on all ranks together, and on each rank independently. Collective.

    Args:
        config: Configuration from `gpu_step.comparable`.
        names: Contenders of odc_mpi on all ranks.
        steps: Minibatches per round.
        repeats: Number of rounds.
        report: Called with a line about the next measurement.

    Returns:
        Entry `ranks` of the object of `gpu.py`.

    Raises:
        AllRanksUserError: Plain torch failed, or losses differ.
    """
    torch.set_num_threads(config.run.threads or world.cores_per_rank())
    config = replace(config, optim=replace(config.optim, learning_rate=0.0))
    with world.split("self") as self_world:
        contenders = Contenders(world, device, lambda line: report(f"ranks, {line}"))
        contenders.add(PLAIN, lambda: contenders.plain(config))
            contenders.add(INDEPENDENT, partial(contenders.trainer, INDEPENDENT, config, self_world, **COMM[DEVICE]))
        for name in names:
            contenders.add(name, partial(contenders.trainer, name, config, world, **COMM[name]))
        return run(contenders, config, steps, repeats)
