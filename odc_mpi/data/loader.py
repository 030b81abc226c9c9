"""Loader: an endless, resumable sequence of minibatches, and the microbatches of each rank as tensors.

All ranks construct the same loader, except for `rank`, and get the same minibatches and plans in the same order without
communication. A rank reads only its own sequences from the file, each when it is needed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset import Dataset
from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, BalanceStrategy, Plan, check_fit
from odc_mpi.data.plan.context_parallel import split_longest
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.rank_independent_packing import rank_independent_packing
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

IGNORED_LABEL = -100  # the default `ignore_index` of `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class Microbatch:
    """Concatenated sequences without padding, or a chunk of one sequence: the data of one forward and backward.

    Attributes:
        inputs: Arguments of a Hugging Face causal model. `input_ids`, `position_ids` (from 0 in each sequence) and
            `labels`, all int64 [1, T]; `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [num_sequences + 1], the bounds of
            the sequences; `max_length_q` and `max_length_k`, ints; `use_cache`, False: otherwise attention
            implementations that ignore the bounds would not separate the sequences by their positions. Labels are -100
            for tokens without loss and for the first token of each sequence, so a model that shifts labels never
            predicts it from another sequence.
        num_tokens: Number of loss tokens, whose labels are not -100.
        num_input_tokens: T.
        indices: Indices of the sequences in the data set, int64 [num_sequences].
        is_chunk: True for a chunk of one sequence, whose other chunks are on other ranks.
    """

    inputs: dict[str, Any]
    num_tokens: int
    num_input_tokens: int
    indices: npt.NDArray[np.int64]
    is_chunk: bool = False

    def to(self, device: torch.device) -> "Microbatch":
        """Return the microbatch with its tensors on a device. The bounds of sequences stay on the host."""
        if device.type == "cpu":
            return self
        bounds = ("cu_seq_lens_q", "cu_seq_lens_k")
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) and name not in bounds else value
            for name, value in self.inputs.items()
        }
        return replace(self, inputs=moved)


@dataclass(frozen=True)
class Minibatch:
    """The sequences of one optimizer step over all ranks. Iterating reads and yields this rank's microbatches.

    A plan with a pool has microbatches without a rank. Iterating such a minibatch is an error, since it would silently
    skip the pool; use `microbatches`.

    Attributes:
        data_epoch: Number of complete passes over the data set before this one.
        position: Number of sequences in this data epoch before this minibatch.
        indices: Indices of all ranks' sequences in the data set, int64 [n].
        num_tokens: Number of loss tokens over all ranks, the divisor for a sum of losses.
        num_input_tokens: Number of tokens over all ranks.
        plan: Microbatches of the ranks. They refer to sequences by positions in `indices`.
        rank: Rank whose microbatches iterating yields.
    """

    data_epoch: int
    position: int
    indices: npt.NDArray[np.int64]
    num_tokens: int
    num_input_tokens: int
    plan: Plan
    rank: int
    dataset: Dataset

    @classmethod
    def from_indices(
        cls, dataset: Dataset, indices: npt.NDArray[np.int64], plan: Plan, rank: int, *, data_epoch: int, position: int
    ) -> "Minibatch":
        """Create the minibatch of some sequences, without reading them."""
        num_tokens, num_input_tokens = dataset.num_trained_tokens[indices].sum(), dataset.lengths[indices].sum()
        return cls(data_epoch, position, indices, int(num_tokens), int(num_input_tokens), plan, rank, dataset)

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
        # Ranks do not synchronize in microbatches, so this rank can skip an empty one.
        for positions in filter(None, self.plan.microbatches[self.rank]):
            yield read_microbatch(self.dataset, self.indices[list(positions)])

    def dummy_microbatches(self) -> Iterator[Microbatch]:
        """Yield the shortest sequence once for each microbatch that another rank has more than this one.

        For collectives within microbatches. The losses and gradients of these dummy microbatches must be ignored.
        """
        counts = [sum(map(bool, microbatches)) for microbatches in self.plan.microbatches]
        shortest = int(self.dataset.lengths[self.indices].argmin())
        for _ in range(max(counts) - counts[self.rank]):
            yield read_microbatch(self.dataset, self.indices[shortest : shortest + 1])

    def microbatches(self, claim: Callable[[int], Iterable[int]]) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, then those that it claims from the pool, one at a time.

        `claim(length of the pool)` yields positions that no other rank gets, as `Tickets.draw` does.
        """
        yield from self._fixed()
        pool = self.plan.pool
        for position in claim(len(pool)) if pool else ():
            yield read_microbatch(self.dataset, self.indices[list(pool[position])])


def read_microbatch(dataset: Dataset, indices: npt.NDArray[np.int64]) -> Microbatch:
    """Read the sequences of these indices, int64 [num_sequences], at least one, into a microbatch."""
    sequences = [dataset[i] for i in indices]
    lengths = [len(tokens) for tokens, _ in sequences]
    labels = [np.where(loss_mask, tokens, IGNORED_LABEL) for tokens, loss_mask in sequences]
    for sequence_labels in labels:
        sequence_labels[0] = IGNORED_LABEL
    flat_labels = np.concatenate(labels)
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate([tokens for tokens, _ in sequences]))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "labels": torch.from_numpy(flat_labels)[None],
        **flash_attention_kwargs(lengths),
    }
    return Microbatch(inputs, int(np.count_nonzero(flat_labels != IGNORED_LABEL)), sum(lengths), indices)


def read_chunk(dataset: Dataset, index: int, begin: int, end: int) -> Microbatch:
    """Read the tokens from `begin` to `end` of the sequence `index`, with their positions, into a microbatch.

    Its `inputs` have two more arguments: `shift_labels`, int64 [1, T], the label of each token's successor, so that the
    last token of a chunk predicts the first token of the next; and `num_items_in_batch`, the number of loss tokens, at
    least 1: a chunk may have none, and its mean loss would be NaN.
    """
    tokens, loss_mask = dataset[index]
    labels = np.append(np.where(loss_mask, tokens, IGNORED_LABEL), IGNORED_LABEL)
    labels[0] = IGNORED_LABEL
    shifted = labels[begin + 1 : end + 1]
    num_tokens, num_trained = end - begin, int(np.count_nonzero(shifted != IGNORED_LABEL))
    inputs = {
        "input_ids": torch.from_numpy(tokens[begin:end])[None],
        "position_ids": torch.arange(begin, end)[None],
        "labels": torch.from_numpy(labels[begin:end])[None],
        "shift_labels": torch.from_numpy(shifted)[None],
        "num_items_in_batch": max(1, num_trained),
        **flash_attention_kwargs([num_tokens]),
    }
    return Microbatch(inputs, num_trained, num_tokens, np.array([index]), is_chunk=True)


def flash_attention_kwargs(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the bounds of concatenated sequences as `FlashAttentionKwargs` of transformers."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    # With a cache, which is the default, transformers silently ignores the bounds of sequences.
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest, "use_cache": False}


class ShuffledSampler:
    """Endless sampler of the sequences or prompts of minibatches. Its state is the position of the next minibatch.

    Each data epoch is one pass over the data set in a new random order; its last minibatch may be smaller. The order
    depends on the seed and the data epoch only, so a run resumes on another number of ranks with the same minibatches.

    Args:
        dataset: Data set; the caller closes it.
        num_samples: Number of sequences or prompts in a minibatch, over all ranks.
    """

    def __init__(self, dataset: Dataset | PromptDataset, num_samples: int, seed: int) -> None:
        self._dataset: Any = dataset
        self._num_samples, self._seed = num_samples, seed
        self._move_to(0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next minibatch, the same on every rank.

        `position` is the number of sequences or prompts of the data epoch `data_epoch` that were sampled already.
        """
        return {"data_epoch": self._data_epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of a `state_dict` for the same seed and data set; a UserError if it is another."""
        data_epoch, position = state["data_epoch"], state["position"]
        if data_epoch < 0 or not 0 <= position < len(self._dataset):
            raise UserError(
                f"expected a position from 0 to {len(self._dataset) - 1} in {str(self._dataset.path)!r}, got "
                f"{position} of data epoch {data_epoch} from the checkpoint: set data.path to the data of that run"
            )
        self._move_to(data_epoch, position)

    def _next_indices(self) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
        """Return the position of the next minibatch and its sequences or prompts, and advance to the one after it."""
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
        cost: Cost of sequences. It may be changed between minibatches, to the same on every rank.
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
    ) -> None:
        """Check the settings against the data.

        Args:
            minibatch_sequences: Number of sequences in a minibatch, over all ranks.
            balance: Name of one of `BALANCE_STRATEGIES`.
            seed: Seed of the random order, at least 0, the same on every rank.
            rank: Rank whose microbatches the minibatches yield.
            context_parallel: True to allow split sequences. Requires the balance `dynamic`, without `exact`.
            exact: True for microbatches that depend neither on the number of ranks nor on later values of `cost`.

        Raises:
            UserError: A setting is out of range, or a sequence is too long.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        strategy = rank_independent_packing(balance, cost) if exact else _find_strategy(balance)
        self._strategy = split_longest if context_parallel else strategy
        for setting, value, minimum in (
            ("data.minibatch_sequences", minibatch_sequences, 1),
            ("data.max_tokens_per_microbatch", max_tokens_per_microbatch, 1),
            ("run.seed", seed, 0),
        ):
            if value < minimum:
                raise UserError(f"expected {setting} of at least {minimum}, got {value}")
        # Here instead of in the middle of the training.
        check_fit(dataset.lengths, max_tokens_per_microbatch, size if context_parallel else 1)
        super().__init__(dataset, minibatch_sequences, seed)
        self._max_tokens = max_tokens_per_microbatch
        self._rank, self._size = rank, size
        self.cost = cost

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Minibatch:
        """Sample and plan the next minibatch, without reading its sequences."""
        position, indices = self._next_indices()
        plan = self._strategy(self._dataset.lengths[indices], self._size, self._max_tokens, self.cost)
        return Minibatch.from_indices(self._dataset, indices, plan, self._rank, **position)


def _find_strategy(name: str) -> BalanceStrategy:
    if name not in BALANCE_STRATEGIES:
        hint = did_you_mean(name, BALANCE_STRATEGIES)
        raise UserError(f"expected data.balance among {', '.join(BALANCE_STRATEGIES)}, got {name!r}{hint}")
    return BALANCE_STRATEGIES[name]
