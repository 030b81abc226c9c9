"""FSDP2 over gloo: what torch itself offers for sharded training on CPUs. The baseline of `bench train`.

Each layer, and the rest as the root, is a group of `fully_shard`: gathered before its forward, freed after it, gathered
again before its backward, its gradient reduced at once. That is its default, and ZeRO-3. All ranks run as many
microbatches, which is what FSDP needs; a rank that has fewer runs its minibatch's shortest sequence for nothing.
"""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from odc_mpi.bench.baselines.gloo import Gloo
from odc_mpi.bench.baselines.unsharded import UnshardedBaseline, run_microbatches
from odc_mpi.data.loader import Loader, Minibatch
from odc_mpi.runtime.world import World
from odc_mpi.training.settings import Config


class FSDPBaseline(UnshardedBaseline):
    """Training with FSDP2. Making one, and each step, is collective.

    Args:
        world: The ranks, all on one node.
        config: Of the run.
        loader: A loader of its own, with a balance that gives each rank as many microbatches.
    """

    def __init__(self, world: World, config: Config, loader: Loader) -> None:
        self._world = world
        self._gloo = Gloo(world)
        super().__init__(config, loader)

    def close(self) -> None:
        """End the process group. Collective."""
        self._gloo.close()

    def _prepare(self, model: nn.Module) -> nn.Module:
        """Shard in the units that `shard_model` takes by default."""
        mesh = init_device_mesh("cpu", (self._world.size,))
        units = set(getattr(model, "_no_split_modules", None) or ())
        for part in model.modules():
            if type(part).__name__ in units:
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def _run(self, minibatch: Minibatch) -> float:
        # FSDP takes the mean over ranks.
        loss = run_microbatches(self._model, minibatch, minibatch, factor=self._world.size)
        run_microbatches(self._model, minibatch, minibatch.dummy_microbatches(), factor=0.0)
        return loss
