"""Source of minibatches from a prepared data set, and a callback that fits the cost model to measured times.

A rank that cannot read a sequence continues with placeholder tokens, because other ranks may be waiting for it. At the
end of the minibatch, all ranks discard the gradients, save the last complete step and raise the same error.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVWindows
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset.format import DamagedDatasetError
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.loader import Loader, PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch, read_chunk
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCostModel
from odc_mpi.errors import AllRanksUserError
from odc_mpi.models.attention import SequenceChunk
from odc_mpi.models.context_parallel_attention import context_parallel_attention
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import SPEED, Metric
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.loop import MinibatchSource


class DamageFoundError(AllRanksUserError):
    """Raised on every rank if any rank could not read a sequence. The message comes from the lowest such rank."""


class PlaceholderDataset:
    """View of a data set that returns placeholders for sequences that cannot be read.

    A placeholder has as many tokens (all 0) and loss tokens as the original. `damage` is the first read error, or None.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self.kind, self.columns = dataset, dataset.kind, dataset.columns
        self.lengths, self.num_trained_tokens = dataset.lengths, dataset.num_trained_tokens
        self.damage: DamagedDatasetError | None = None

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Read a sequence as `Dataset` does, or return a placeholder and set `damage`."""
        try:
            return self._dataset[index]
        except DamagedDatasetError as error:
            self.damage = self.damage or error
            length = int(self.lengths[index])
            return np.zeros(length, dtype=np.int64), np.arange(length) >= length - self.num_trained_tokens[index]

    def apply(self, minibatch: PlannedMinibatch) -> PlannedMinibatch:
        """Return a minibatch whose sequences are read through this view."""
        return replace(minibatch, dataset=cast(Dataset, self))

    def raise_damage(self, world: World) -> None:
        """Raise `DamageFoundError` on all ranks if `damage` is set on any rank. Collective."""
        for rank, message in enumerate(world.gather_objects(self.damage and str(self.damage))):
            if message is not None:
                raise DamageFoundError(f"rank {rank}: {message}")


class DatasetSource(MinibatchSource):
    """Source of minibatches, which `loader` draws from a prepared data set. `close` closes the data set.

    With `tickets`, idle ranks claim the microbatches in a plan's pool, one at a time. Plans that split sequences
    require `windows`. The random numbers for dropout depend on `seed` and the microbatch, not on the rank.
    """

    gathered_names = ("damage",)
    metrics = (
        *MinibatchSource.metrics,
        Metric("num_cut_sequences", "sequences that were split over ranks, with `data.context_parallel`", SPEED),
    )

    def __init__(
        self,
        world: World,
        dataset: Dataset,
        loader: Loader,
        seed: int,
        tickets: Tickets | None,
        windows: KVWindows | None = None,
    ) -> None:
        self._world, self._dataset, self._loader = world, dataset, loader
        self._placeholders = PlaceholderDataset(dataset)
        self._before = loader.state_dict()
        self._seed, self._tickets, self._windows = seed, tickets, windows
        self._num_splits = 0

    def next_minibatch(self) -> PlannedMinibatch:
        """Return the next minibatch from the loader."""
        self._before = self._loader.state_dict()
        return self._placeholders.apply(next(self._loader))

    def microbatches(self, minibatch: PlannedMinibatch) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, chunks first, and seed torch for each. One-sided with tickets or windows."""
        chunks = self._chunks(self._windows, minibatch) if self._windows else ()
        others = minibatch.microbatches(self._tickets.draw) if self._tickets else minibatch
        for microbatch, chunk in itertools.chain(chunks, ((each, 0) for each in others)):
            # The first chunk has the seed of the unsplit sequence; the others must not repeat its random numbers.
            chunk_number = (chunk,) if chunk else ()
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(microbatch.indices[0]), *chunk_number))
            yield microbatch

    def _chunks(self, windows: KVWindows, minibatch: PlannedMinibatch) -> Iterator[tuple[Microbatch, int]]:
        """Yield this rank's chunks as microbatches, each with the chunk's index in its sequence. One-sided.

        The caller must run the forward and backward passes of a chunk before requesting the next one. In a run, all
        ranks number the split sequences consecutively from 1. See docs/scheduling.md.
        """
        for split in minibatch.plan.splits:
            self._num_splits += 1
            if minibatch.rank not in split.ranks:
                continue
            bounds, ranks, index = split.bounds, split.ranks, int(minibatch.indices[split.position])
            number = ranks.index(minibatch.rank)
            microbatch = read_chunk(minibatch.dataset, index, *bounds[number : number + 2])
            with WindowKVExchange(windows, self._num_splits, bounds, ranks, f"sequence {index}") as exchange:
                chunk = SequenceChunk(bounds[-1], lambda *args, last=exchange: context_parallel_attention(*args, last))
                yield replace(microbatch, inputs=microbatch.inputs | {"chunk": chunk}), number

    def num_microbatches(self, minibatch: PlannedMinibatch) -> int | None:
        """Return the number of this rank's microbatches, or None if ranks claim some of them at run time."""
        plan, rank = minibatch.plan, minibatch.rank
        num_chunks = sum(rank in split.ranks for split in plan.splits)
        return None if plan.pool else sum(map(bool, plan.microbatches[rank])) + num_chunks

    def local_values(self) -> tuple[float]:
        """Return a one-element tuple: 1 if this rank could not read a sequence, otherwise 0."""
        return (float(self._placeholders.damage is not None),)

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Reset the tickets. One-sided.

        If a rank could not read a sequence, rewinds the loader to the start of the minibatch and raises
        `DamageFoundError` on all ranks. Collective in this case.
        """
        if self._tickets:
            self._tickets.reset()
        if gathered.sum("damage"):
            self._loader.load_state_dict(self._before)
            self._placeholders.raise_damage(self._world)

    def on_step_end(self, step: Step) -> None:
        """Add the token count and, with `windows`, the number of split sequences to the metrics."""
        step.metrics["num_input_tokens"] = step.minibatch.num_input_tokens
        if self._windows:
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
        """Return sums over the microbatches recorded since the last call."""
        return self._fitted.report().tolist()

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
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
