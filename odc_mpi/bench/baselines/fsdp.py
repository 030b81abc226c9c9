"""Baseline for `bench train`: FSDP2 over gloo, which is PyTorch's own sharded training on CPUs.

Each layer is a parameter group of `fully_shard`, and all other parameters form the root group. Parameters of layers are
freed after the forward pass and gathered again for the backward pass, as in ZeRO-3.

FSDP requires all ranks to run the same number of microbatches. A rank with fewer also runs the shortest sequence of the
minibatch, with zero gradients. Construct a `Gloo` first, because it initializes the process group.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from odc_mpi.bench.baselines.unsharded import UnshardedBaseline, run_microbatches
from odc_mpi.data.loader import Loader, Minibatch
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config


class FSDPBaseline(UnshardedBaseline):
    """Contender that trains with FSDP2. No other contender may use `loader`. Construction is collective."""

    def __init__(self, world: World, config: Config, loader: Loader) -> None:
        self._world = world
        super().__init__(config, loader)

    @override
    def _prepare(self, model: nn.Module) -> nn.Module:
        # The layers are the default units of `shard_model`.
        mesh = init_device_mesh("cpu", (self._world.size,))
        units = set(getattr(model, "_no_split_modules", None) or ())
        for part in model.modules():
            if type(part).__name__ in units:
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    @override
    def _run(self, minibatch: Minibatch) -> torch.Tensor:
        # FSDP averages gradients over ranks; the loss needs their sum.
        loss = run_microbatches(self._token_logps, minibatch, minibatch, factor=self._world.size)
        run_microbatches(self._token_logps, minibatch, minibatch.dummy_microbatches(), factor=0.0)
        return loss
