"""Minibatches of a prepared data set: which microbatches this rank runs, and what sequences are taken to cost."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.dataset import Dataset
from odc_mpi.data.loader import Batch, Loader, Minibatch
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCost
from odc_mpi.observe.metrics import Column, Entry
from odc_mpi.observe.participant import Participant, Ran, Step
from odc_mpi.shard import model as sharded
from odc_mpi.train.context import Pieces
from odc_mpi.train.loop import Source


class DatasetSource(Source):
    """The loader's minibatches, split as their plan says.

    Args:
        dataset: Closed with the source.
        loader: Plans minibatches.
        seed: Of random numbers in the model.
        tickets: Under which ranks draw what the plan leaves to whoever is free.
        pieces: Of the sequences that the plan cuts; None if it cuts none.
    """

    columns: ClassVar = (Column("tokens/s", 9, lambda line: f"{line['tokens_per_s']:,.0f}"),)
    summary: ClassVar = {"tokens": Entry("num_input_tokens", "sum"), "tokens_per_s": Entry("tokens_per_s", "mean")}

    def __init__(
        self,
        dataset: Dataset,
        loader: Loader,
        seed: int,
        tickets: Tickets | None,
        pieces: Pieces | None = None,
    ) -> None:
        self._dataset, self._loader = dataset, loader
        self._seed, self._tickets, self._pieces = seed, tickets, pieces

    def draw(self) -> Minibatch:
        """Return the next minibatch. Local."""
        return next(self._loader)

    def microbatches(self, minibatch: Minibatch) -> Iterator[Batch]:
        """Yield this rank's microbatches, pieces first, and seed for each. Local; one-sided with tickets and pieces."""
        for batch, number in self._pieces.batches(minibatch) if self._pieces else ():
            # The first as the whole sequence; the others not the same numbers once more.
            later = (number,) if number else ()
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(batch.indices[0]), *later))
            yield batch
        for batch in minibatch.batches(self._tickets.draw) if self._tickets else minibatch:
            # Random numbers belong to the microbatch, not to the rank that happens to run it.
            torch.manual_seed(_seed(self._seed, minibatch.data_epoch, int(batch.indices[0])))
            yield batch

    def num_microbatches(self, minibatch: Minibatch) -> int | None:
        """Return how many microbatches the plan has for this rank; None if it leaves some to whoever is free. Local."""
        plan, rank = minibatch.plan, minibatch.rank
        num_pieces = sum(rank in split.ranks for split in plan.splits)
        return None if plan.pool else sum(map(bool, plan.microbatches[rank])) + num_pieces

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Make the tickets ready for the next minibatch: all ranks have drawn. Local."""
        if self._tickets:
            self._tickets.reset()

    def after_step(self, step: Step) -> None:
        """Report the tokens that went through the model. Local."""
        num_tokens = step.minibatch.num_input_tokens
        step.metrics |= {"num_input_tokens": num_tokens, "tokens_per_s": num_tokens / step.metrics["step_s"]}
        if self._pieces:
            step.metrics["num_cut_sequences"] = len(step.minibatch.plan.splits)

    def state(self) -> dict[str, Any]:
        """Return where the next minibatch begins. Local."""
        return {"loader": self._loader.state_dict()}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Go on at a minibatch. Local."""
        self._loader.load_state_dict(about["loader"])

    def close(self) -> None:
        """Close the data set. Local."""
        self._dataset.close()


class LearnedCost(Participant):
    """Has the loader plan by what this run's own microbatches took (`data.plan.fitted`).

    Args:
        dataset: Knows the lengths.
        loader: Has the prior; gets what is learned.
    """

    names = tuple(f"cost_{i}" for i in range(ROW_LENGTH))

    def __init__(self, dataset: Dataset, loader: Loader) -> None:
        self._lengths, self._loader = dataset.lengths, loader
        self._fitted = FittedCost(loader.cost)

    def after_microbatch(self, ran: Ran) -> None:
        """Take note of how long a microbatch took. Local."""
        if ran.batch.is_piece:
            begin = int(ran.batch.inputs["position_ids"][0, 0])
            self._fitted.observe_piece(begin, begin + ran.batch.num_input_tokens, ran.own_s)
        else:
            self._fitted.observe(self._lengths[ran.batch.indices], ran.own_s)

    def tell(self) -> list[float]:
        """Return the times that this rank observed. Local."""
        row: list[float] = self._fitted.report().tolist()
        return row

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Fit the cost to what all ranks observed. Local."""
        self._fitted.update(np.stack([told.per_rank(name) for name in self.names], axis=1))
        self._loader.cost = self._fitted.cost

    def state(self) -> dict[str, Any]:
        """Return the learned cost. Local."""
        return {"cost": self._fitted.state_dict()}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Continue with what was learned, if the run before learned something. Local."""
        if about["cost"]:
            self._fitted.load_state_dict(about["cost"])
            self._loader.cost = self._fitted.cost


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
