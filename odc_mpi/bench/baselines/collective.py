"""Baseline for `bench train`: an odc_mpi model over MPI collectives, with the communication pattern of FSDP.

Ranks wait for each other at every unit of every microbatch (see `comm.collective`), so all ranks must run the same
number of microbatches. A rank with fewer also runs the shortest sequence of the minibatch, with zero gradients.
"""

from typing_extensions import override

from odc_mpi.api import decide_for, shard_model
from odc_mpi.bench.baselines.unsharded import run_microbatches
from odc_mpi.bench.contenders import Contender
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.runtime.world import World
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.settings import OptimConfig
from odc_mpi.training.update import make_optimizer


class CollectiveBaseline(Contender):
    """Contender that uses MPI collectives. Construction is collective. `close` also closes `inputs`."""

    def __init__(self, world: World, config: OptimConfig, inputs: Inputs) -> None:
        self._max_norm, self._inputs = config.max_grad_norm, inputs
        decision = decide_for(world, transport="collective")
        self.model = shard_model(inputs.model.module, world, weights=inputs.model.weights, decision=decision).train()
        self._token_logps = TokenLogps(self.model.module)
        self._optimizer = make_optimizer(config, self.model.named_shard_parameters(), self.model.parameter_shapes())

    @override
    def step(self) -> tuple[float, int]:
        minibatch = next(self._inputs.sequence_loader)
        with self.model.minibatch():
            loss = run_microbatches(self._token_logps, minibatch, minibatch)
            run_microbatches(self._token_logps, minibatch, minibatch.dummy_microbatches(), factor=0.0)
        if self._max_norm:
            self.model.clip_grad_norm_(self._max_norm)
        self._optimizer.step()
        self.model.publish()
        return loss.item(), minibatch.num_input_tokens

    def close(self) -> None:
        """Free the memory of the model and close the data sets. Collective."""
        self.model.close()
        self._inputs.close()
