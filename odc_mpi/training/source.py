"""Minibatches of a prepared data set: this rank's microbatches, and the fitted cost model."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Loader, Microbatch, Minibatch
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCostModel
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.shard import model as sharded
from odc_mpi.training.context_parallel import ChunkMicrobatches
from odc_mpi.training.loop import MinibatchSource


class DatasetSource(MinibatchSource):
    """Minibatches of a loader, with the microbatches that their plans assign to this rank.

    Args:
        dataset: Data set of the loader; `close` closes it.
        seed: Seed of the random numbers in the model, such as dropout.
        tickets: Counter to claim the microbatches that a plan assigns to no rank; None if there are none.
        chunks: Chunks of split sequences; None without context parallelism.
    """

    def __init__(
        self,
        dataset: Dataset,
        loader: Loader,
        seed: int,
        tickets: Tickets | None,
        chunks: ChunkMicrobatches | None = None,
    ) -> None:
        self._dataset, self._loader = dataset, loader
        self._seed, self._tickets, self._chunks = seed, tickets, chunks

    def next_minibatch(self) -> Minibatch:
        """Return the next minibatch of the loader."""
        return next(self._loader)

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, chunks first, and seed torch for each. One-sided with tickets or chunks."""
        for microbatch, number in self._chunks.microbatches(minibatch) if self._chunks else ():
            # The first chunk has the seed of the unsplit sequence; the others must not repeat its random numbers.
            chunk_number = (number,) if number else ()
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(microbatch.indices[0]), *chunk_number))
            yield microbatch
        for microbatch in minibatch.microbatches(self._tickets.draw) if self._tickets else minibatch:
            # Random numbers depend on the microbatch, not on the rank that runs it.
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(microbatch.indices[0])))
            yield microbatch

    def num_microbatches(self, minibatch: Minibatch) -> int | None:
        """Return the number of microbatches of this rank; None if ranks claim some of them."""
        plan, rank = minibatch.plan, minibatch.rank
        num_chunks = sum(rank in split.ranks for split in plan.splits)
        return None if plan.pool else sum(map(bool, plan.microbatches[rank])) + num_chunks

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Reset the tickets for the next minibatch: all ranks are done claiming."""
        if self._tickets:
            self._tickets.reset()

    def on_step_end(self, step: Step) -> None:
        """Report tokens and tokens per second."""
        num_tokens = step.minibatch.num_input_tokens
        step.metrics |= {"num_input_tokens": num_tokens, "tokens_per_s": num_tokens / step.metrics["step_s"]}
        if self._chunks:
            step.metrics["num_cut_sequences"] = len(step.minibatch.plan.splits)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader."""
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position of the loader."""
        self._loader.load_state_dict(state_dict["loader"])

    def close(self) -> None:
        """Close the data set."""
        self._dataset.close()


class FitCostModel(Callback):
    """Fits the cost model of a loader to the measured times of this run's microbatches (`data.plan.fitted`)."""

    gathered_names = tuple(f"cost_{i}" for i in range(ROW_LENGTH))

    def __init__(self, dataset: Dataset, loader: Loader) -> None:
        self._lengths, self._loader = dataset.lengths, loader
        self._fitted = FittedCostModel(loader.cost)

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Record the busy time of a microbatch."""
        if result.microbatch.is_chunk:
            begin = int(result.microbatch.inputs["position_ids"][0, 0])
            self._fitted.observe_chunk(begin, begin + result.microbatch.num_input_tokens, result.busy_s)
        else:
            self._fitted.observe(self._lengths[result.microbatch.indices], result.busy_s)

    def local_values(self) -> list[float]:
        """Return the sums of this rank's observations."""
        row: list[float] = self._fitted.report().tolist()
        return row

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Fit the cost model to the observations of all ranks."""
        self._fitted.update(np.stack([gathered.per_rank(name) for name in self.gathered_names], axis=1))
        self._loader.cost = self._fitted.cost

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted cost model."""
        return {"cost": self._fitted.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the fitted cost model, if the checkpoint has one."""
        if state_dict["cost"]:
            self._fitted.load_state_dict(state_dict["cost"])
            self._loader.cost = self._fitted.cost


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
