"""Source of minibatches from a prepared data set, and a callback that fits the cost model to measured times."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader, Minibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCostModel
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.training.context_parallel import ChunkMicrobatches
from odc_mpi.training.damage import PlaceholderDataset
from odc_mpi.training.loop import MinibatchSource


class DatasetSource(MinibatchSource):
    """Source of the minibatches that `loader` draws from a prepared data set. `close` closes the data set.

    The plan of a minibatch assigns each microbatch to a rank or leaves it in a pool, from which idle ranks claim one
    microbatch at a time with `tickets`. Plans that split sequences require `chunks`. Dropout depends on `seed`.

    If a rank cannot read a sequence, `on_gathered` rewinds the loader to the start of the minibatch and raises
    `DamageFoundError` on every rank.
    """

    gathered_names = ("damage",)

    def __init__(
        self,
        world: World,
        dataset: Dataset,
        loader: Loader,
        seed: int,
        tickets: Tickets | None,
        chunks: ChunkMicrobatches | None = None,
    ) -> None:
        self._world, self._dataset, self._loader = world, dataset, loader
        self._placeholders = PlaceholderDataset(dataset)
        self._before = loader.state_dict()
        self._seed, self._tickets, self._chunks = seed, tickets, chunks

    def next_minibatch(self) -> Minibatch:
        """Return the next minibatch from the loader."""
        self._before = self._loader.state_dict()
        return self._placeholders.apply(next(self._loader))

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, chunks of split sequences first. One-sided if there are tickets or chunks.

        Before each microbatch, torch's random number generator is seeded with a value that does not depend on the rank.
        """
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
        """Return the number of this rank's microbatches, or None if ranks claim some of them at run time."""
        plan, rank = minibatch.plan, minibatch.rank
        num_chunks = sum(rank in split.ranks for split in plan.splits)
        return None if plan.pool else sum(map(bool, plan.microbatches[rank])) + num_chunks

    def local_values(self) -> tuple[float]:
        """Return a one-element tuple: 1 if this rank could not read a sequence, otherwise 0."""
        return (float(self._placeholders.damage is not None),)

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Reset the tickets. One-sided. Raises `DamageFoundError` on all ranks (collective) if any had a read error."""
        if self._tickets:
            self._tickets.reset()
        if gathered.sum("damage"):
            self._loader.load_state_dict(self._before)
            self._placeholders.raise_damage(self._world)

    def on_step_end(self, step: Step) -> None:
        """Add the token count, the throughput and, with `chunks`, the number of split sequences to the metrics."""
        num_tokens = step.minibatch.num_input_tokens
        step.metrics |= {"num_input_tokens": num_tokens, "tokens_per_s": num_tokens / step.metrics["step_s"]}
        if self._chunks:
            step.metrics["num_cut_sequences"] = len(step.minibatch.plan.splits)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position in the data, as the entry `loader`."""
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loader's position in the data."""
        self._loader.load_state_dict(state_dict["loader"])

    def close(self) -> None:
        """Close the data set."""
        self._dataset.close()


class FitCostModel(Callback):
    """Fits a loader's cost model to the measured times of microbatches. See `data.plan.fitted`."""

    gathered_names = tuple(f"cost_{i}" for i in range(ROW_LENGTH))

    def __init__(self, dataset: Dataset, loader: Loader) -> None:
        self._lengths, self._loader = dataset.lengths, loader
        self._fitted = FittedCostModel(loader.cost)

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Record how long this rank was busy with a microbatch or a chunk."""
        if result.microbatch.is_chunk:
            begin = int(result.microbatch.inputs["position_ids"][0, 0])
            self._fitted.observe_chunk(begin, begin + result.microbatch.num_input_tokens, result.busy_s)
        else:
            self._fitted.observe(self._lengths[result.microbatch.indices], result.busy_s)

    def local_values(self) -> list[float]:
        """Return sums over the microbatches that this rank has recorded since the last call, as input to the fit."""
        row: list[float] = self._fitted.report().tolist()
        return row

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Fit the cost model to the times measured on all ranks, and pass the result to the loader."""
        self._fitted.update(np.stack([gathered.per_rank(name) for name in self.gathered_names], axis=1))
        self._loader.cost = self._fitted.cost

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted cost model as the entry `cost`."""
        return {"cost": self._fitted.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the fitted cost model, if the checkpoint contains one."""
        if state_dict["cost"]:
            self._fitted.load_state_dict(state_dict["cost"])
            self._loader.cost = self._fitted.cost


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
