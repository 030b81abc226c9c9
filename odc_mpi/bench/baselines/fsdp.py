"""Baseline of `bench train` with FSDP2 over gloo, the sharded training of PyTorch on CPUs.

Each layer is a group of `fully_shard`; all other parameters form the root group. Parameters of a group are all-gathered
before its forward, freed after it, and all-gathered again before its backward. Its gradients are reduce-scattered after
its backward. This is the default of FSDP2, and equals ZeRO-3.

FSDP needs the same number of microbatches on all ranks. A rank with fewer runs the shortest sequence of its minibatch
with a loss multiplied by zero. Construct a `Gloo` before, which is the process group.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from odc_mpi.bench.baselines.unsharded import UnshardedBaseline, run_microbatches
from odc_mpi.data.loader import Loader, Minibatch
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config


class FSDPBaseline(UnshardedBaseline):
    """Contender that trains with FSDP2, on a loader of its own. Construction is collective."""

    def __init__(self, world: World, config: Config, loader: Loader) -> None:
        self._world = world
        super().__init__(config, loader)

    @override
    def _prepare(self, model: nn.Module) -> nn.Module:
        # The default units of `shard_model`.
        mesh = init_device_mesh("cpu", (self._world.size,))
        units = set(getattr(model, "_no_split_modules", None) or ())
        for part in model.modules():
            if type(part).__name__ in units:
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    @override
    def _run(self, minibatch: Minibatch) -> float:
        # FSDP averages gradients over ranks; the loss needs their sum.
        loss = run_microbatches(self._token_logps, minibatch, minibatch, factor=self._world.size)
        run_microbatches(self._token_logps, minibatch, minibatch.dummy_microbatches(), factor=0.0)
        return loss
