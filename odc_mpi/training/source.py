"""Minibatches of a prepared data set: which microbatches this rank runs, and what sequences are taken to cost."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Loader, Microbatch, Minibatch
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCostModel
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.observe.metrics import ProgressColumn, SummaryField
from odc_mpi.shard import model as sharded
from odc_mpi.training.context_parallel import ChunkMicrobatches
from odc_mpi.training.loop import MinibatchSource


class DatasetSource(MinibatchSource):
    """The loader's minibatches, split as their plan says.

    Args:
        dataset: Closed with the source.
        loader: Plans minibatches.
        seed: Of random numbers in the model.
        tickets: Under which ranks draw what the plan leaves to whoever is free.
        chunks: Of the sequences that the plan cuts; None if it cuts none.
    """

    columns: ClassVar = (ProgressColumn("tokens/s", 9, lambda line: f"{line['tokens_per_s']:,.0f}"),)
    summary: ClassVar = {
        "tokens": SummaryField("num_input_tokens", "sum"),
        "tokens_per_s": SummaryField("tokens_per_s", "mean"),
    }

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
        """Return the next minibatch."""
        return next(self._loader)

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, pieces first, and seed for each. Local; one-sided with tickets and pieces."""
        for microbatch, number in self._chunks.microbatches(minibatch) if self._chunks else ():
            # The first as the whole sequence; the others not the same numbers once more.
            chunk_number = (number,) if number else ()
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(microbatch.indices[0]), *chunk_number))
            yield microbatch
        for microbatch in minibatch.microbatches(self._tickets.draw) if self._tickets else minibatch:
            # Random numbers belong to the microbatch, not to the rank that happens to run it.
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(microbatch.indices[0])))
            yield microbatch

    def num_microbatches(self, minibatch: Minibatch) -> int | None:
        """Return how many microbatches the plan has for this rank; None if it leaves some to whoever is free."""
        plan, rank = minibatch.plan, minibatch.rank
        num_chunks = sum(rank in split.ranks for split in plan.splits)
        return None if plan.pool else sum(map(bool, plan.microbatches[rank])) + num_chunks

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Make the tickets ready for the next minibatch: all ranks have drawn."""
        if self._tickets:
            self._tickets.reset()

    def on_step_end(self, step: Step) -> None:
        """Report the tokens that went through the model."""
        num_tokens = step.minibatch.num_input_tokens
        step.metrics |= {"num_input_tokens": num_tokens, "tokens_per_s": num_tokens / step.metrics["step_s"]}
        if self._chunks:
            step.metrics["num_cut_sequences"] = len(step.minibatch.plan.splits)

    def state_dict(self) -> dict[str, Any]:
        """Return where the next minibatch begins."""
        return {"loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at a minibatch."""
        self._loader.load_state_dict(state_dict["loader"])

    def close(self) -> None:
        """Close the data set."""
        self._dataset.close()


class FitCostModel(Callback):
    """Has the loader plan by what this run's own microbatches took (`data.plan.fitted`).

    Args:
        dataset: Knows the lengths.
        loader: Has the prior; gets what is learned.
    """

    gathered_names = tuple(f"cost_{i}" for i in range(ROW_LENGTH))

    def __init__(self, dataset: Dataset, loader: Loader) -> None:
        self._lengths, self._loader = dataset.lengths, loader
        self._fitted = FittedCostModel(loader.cost)

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Take note of how long a microbatch took."""
        if result.microbatch.is_chunk:
            begin = int(result.microbatch.inputs["position_ids"][0, 0])
            self._fitted.observe_chunk(begin, begin + result.microbatch.num_input_tokens, result.busy_s)
        else:
            self._fitted.observe(self._lengths[result.microbatch.indices], result.busy_s)

    def local_values(self) -> list[float]:
        """Return the times that this rank observed."""
        row: list[float] = self._fitted.report().tolist()
        return row

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Fit the cost to what all ranks observed."""
        self._fitted.update(np.stack([gathered.per_rank(name) for name in self.gathered_names], axis=1))
        self._loader.cost = self._fitted.cost

    def state_dict(self) -> dict[str, Any]:
        """Return the learned cost."""
        return {"cost": self._fitted.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with what was learned, if the run before learned something."""
        if state_dict["cost"]:
            self._fitted.load_state_dict(state_dict["cost"])
            self._loader.cost = self._fitted.cost


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
