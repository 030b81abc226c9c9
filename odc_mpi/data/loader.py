"""Loader of an endless, resumable sequence of minibatches, which yield the microbatches of a rank as tensors.

All ranks that train on the same parts of minibatches construct the loader with the same arguments, except for `rank`,
so they get the same minibatches and plans without communicating.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.data.groups import read_groups
from odc_mpi.data.microbatch import Microbatch, read_microbatch
from odc_mpi.data.plan.balance import Plan, check_fit, divide, find_strategy
from odc_mpi.data.plan.context_parallel import split_longest
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import UserError


@dataclass(frozen=True)
class Part:
    """Part `index`, from 0, of `count` parts into which every minibatch is divided, with about equal costs."""

    index: int
    count: int


#: Part of a run that trains on whole minibatches.
WHOLE = Part(0, 1)


@dataclass(frozen=True)
class PlannedMinibatch:
    """Sequences for one optimizer step on all ranks. Iteration reads and yields this rank's microbatches.

    Each microbatch is read only when it is needed. Iteration raises a `UserError` if the plan contains split sequences
    or a pool. If there is a pool, use the method `microbatches` instead.

    Attributes:
        data_epoch: Number of complete passes over the data set before the current pass.
        position: Number of sequences that precede this minibatch in the current pass.
        indices: Data set indices of the sequences on all ranks, int64 [n].
        plan: Assignment of the sequences, given by their positions in `indices`, to microbatches and ranks.
    """

    data_epoch: int
    position: int
    indices: npt.NDArray[np.int64]
    plan: Plan
    rank: int
    dataset: Dataset

    @cached_property
    def num_tokens(self) -> int:
        """Total number of loss tokens on all ranks."""
        return int(self.dataset.num_trained_tokens[self.indices].sum())

    @cached_property
    def num_input_tokens(self) -> int:
        """Total number of tokens on all ranks."""
        return int(self.dataset.lengths[self.indices].sum())

    def __iter__(self) -> Iterator[Microbatch]:
        if self.plan.splits:
            raise UserError(
                "a minibatch with split sequences requires ranks that exchange keys and values, as in odc-mpi train: "
                "set data.context_parallel to off"
            )
        if self.plan.pool:
            raise UserError(
                "a minibatch with a pool of microbatches requires tickets: iterate over "
                "minibatch.microbatches(tickets.draw), or set data.balance to lb_mini"
            )
        return self._fixed()

    def _fixed(self) -> Iterator[Microbatch]:
        # Ranks do not synchronize in each microbatch, so this rank can skip empty ones.
        for positions in filter(None, self.plan.microbatches[self.rank]):
            yield _read(self.dataset, self.indices[list(positions)])

    def microbatches(self, claim: Callable[[int], Iterable[int]]) -> Iterator[Microbatch]:
        """Yield this rank's microbatches other than chunks, and then those that it claims from the pool.

        `claim` is a function, such as `Tickets.draw`, that receives the number of microbatches in the pool and yields
        positions in the pool. Each position must be yielded on exactly one rank.
        """
        yield from self._fixed()
        pool = self.plan.pool
        for position in claim(len(pool)) if pool else ():
            yield _read(self.dataset, self.indices[list(pool[position])])


def _read(dataset: Dataset, indices: npt.NDArray[np.int64]) -> Microbatch:
    return (read_microbatch if dataset.kind == "sequences" else read_groups)(dataset, indices)


class ShuffledSampler:
    """Endless sampler that selects the sequences or prompts for each minibatch.

    Each data epoch is one pass over the data set in a random order that depends only on the seed and the data epoch.
    The last minibatch of a data epoch may be smaller than the others.
    """

    def __init__(self, dataset: Dataset | PromptDataset, num_samples: int, seed: int) -> None:
        """Create the sampler. The caller must close `dataset`.

        `num_samples` is the number of sequences or prompts in a minibatch across all ranks.
        """
        self._dataset: Any = dataset
        self._num_samples, self._seed = num_samples, seed
        self._move_to(0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next minibatch: the data epoch, and the number of samples drawn in it so far."""
        return {"data_epoch": self._data_epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a position returned by `state_dict`. Raises a `UserError` if it is outside the data set."""
        data_epoch, position = state["data_epoch"], state["position"]
        if data_epoch < 0 or not 0 <= position < len(self._dataset):
            raise UserError(
                f"expected a position from 0 to {len(self._dataset) - 1} in {str(self._dataset.path)!r}, got "
                f"{position} of data epoch {data_epoch} from the checkpoint: set data.path to the data of that run"
            )
        self._move_to(data_epoch, position)

    def num_steps_to(self, num_epochs: float) -> int:
        """Return the number of minibatches until `num_epochs` passes, rounded to samples, are complete since the start.

        Earlier minibatches may have had another size.
        """
        size, position = len(self._dataset), self._position
        whole, rest = divmod(max(1, round(num_epochs * size)), size)
        if (num_more := whole - self._data_epoch) > 0:
            return self._ceil(size - position) + (num_more - 1) * self._ceil(size) + self._ceil(rest)
        return max(0, self._ceil(num_more * size + rest - position))

    def num_epochs(self, num_steps: int = 0) -> float:
        """Return the number of passes over the data, with a fraction, that `num_steps` more minibatches complete."""
        size, position = len(self._dataset), self._position
        if num_steps < (steps_left := self._ceil(size - position)):
            return self._data_epoch + (position + num_steps * self._num_samples) / size
        whole, rest = divmod(num_steps - steps_left, self._ceil(size))
        return self._data_epoch + 1 + whole + rest * self._num_samples / size

    def _ceil(self, num_samples: int) -> int:
        return -(-num_samples // self._num_samples)

    def upcoming_indices(self, num_minibatches: int) -> npt.NDArray[np.int64]:
        """Return the sorted, distinct indices in the next minibatches, int64 [n], without advancing the sampler."""
        state, is_upcoming = self.state_dict(), np.zeros(len(self._dataset), dtype=np.bool_)
        for _ in range(num_minibatches):
            if is_upcoming.all():
                break
            is_upcoming[self._next_indices()[1]] = True
        self._move_to(**state)
        return np.flatnonzero(is_upcoming)

    def _next_indices(self) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
        """Return the position and the indices of the next minibatch, and advance the sampler."""
        position, indices = self.state_dict(), self._order[self._position : self._position + self._num_samples]
        if self._position + len(indices) < len(self._dataset):
            self._position += len(indices)
        else:
            self._move_to(self._data_epoch + 1, 0)
        return position, indices

    def _move_to(self, data_epoch: int, position: int) -> None:
        self._data_epoch, self._position = data_epoch, position
        self._order = np.random.default_rng([self._seed, data_epoch]).permutation(len(self._dataset))


class Loader(ShuffledSampler):
    """Endless iterator over minibatches, in the order of `ShuffledSampler`.

    Attributes:
        cost: Cost model for planning. It may be replaced between minibatches, but must be the same on all ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        minibatch_sequences: int,
        max_tokens_per_microbatch: int,
        balance: str = "lb_mini",
        seed: int = 0,
        rank: int = 0,
        size: int = 1,
        cost: CostModel = CostModel(),  # noqa: B008 - frozen
        context_parallel: bool = False,
        exact: bool = False,
        packs: bool = True,
        rows: bool = False,
        part: Part = WHOLE,
    ) -> None:
        """Create the loader, and check the settings against the data. The caller must close `dataset`.

        Args:
            minibatch_sequences: Number of sequences in a minibatch, in all parts together.
            max_tokens_per_microbatch: Maximum number of tokens in a microbatch or a chunk.
            balance: Name of a strategy in `data.plan.balance.BALANCE_STRATEGIES`.
            rank, size: Rank whose microbatches the minibatches yield, and the number of ranks.
            context_parallel: True to plan with `split_longest` regardless of `balance` and `exact`. Requires `packs`.
            exact: True for microbatches that depend neither on the number of ranks nor on later values of `cost`.
            packs: False to put only one sequence in each microbatch, or with `rows` several of like length, which the
                model pads to equal lengths.
            part: Part of each minibatch that the `size` ranks train on. Ranks that are not counted in `size` train on
                the other parts.

        Raises:
            UserError: A setting is invalid, `balance` is not available with `exact`, or a sequence is too long.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert packs or not context_parallel, "split sequences are packed"
        strategy = find_strategy(balance, cost, exact=exact, packs=packs, rows=rows)
        self._strategy = split_longest if context_parallel else strategy
        for setting, value, minimum in (
            ("data.minibatch_sequences", minibatch_sequences, 1),
            ("data.max_tokens_per_microbatch", max_tokens_per_microbatch, 1),
            ("run.seed", seed, 0),
        ):
            if value < minimum:
                raise UserError(f"expected {setting} of at least {minimum}, got {value}")
        # Checked here, so that training does not fail in the middle.
        check_fit(dataset.lengths, max_tokens_per_microbatch, size if context_parallel else 1)
        super().__init__(dataset, minibatch_sequences, seed)
        self._max_tokens = max_tokens_per_microbatch
        self._rank, self._size, self._part = rank, size, part
        # Not a fitted cost, which differs between the ranks of different parts.
        self._first_cost = self.cost = cost

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> PlannedMinibatch:
        """Return the next minibatch with its plan, without reading its sequences."""
        position, indices = self._next_indices()
        plan = self._strategy(self._dataset.lengths[indices], self._size, self._max_tokens, self.cost)
        return PlannedMinibatch(**position, indices=indices, plan=plan, rank=self._rank, dataset=self._dataset)

    @override
    def _next_indices(self) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
        position, indices = super()._next_indices()
        if self._part.count == 1:
            return position, indices
        costs = self._first_cost.sequence(self._dataset.lengths[indices])
        number = position["data_epoch"] * self._ceil(len(self._dataset)) + position["position"] // self._num_samples
        return position, indices[divide(costs, self._part.count, number)[self._part.index]]
