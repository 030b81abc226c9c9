"""An endless, resumable sequence of minibatches, and on each rank its microbatches as tensors.

Every rank runs the same loader with its own `rank`, draws the same minibatches in the same order and computes the same
plan: no communication. A rank reads only its own sequences from the file, each when it is due.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.data.dataset import Dataset
from odc_mpi.data.plan.balance import BALANCE_STRATEGIES, BalanceStrategy, Plan, check_fit
from odc_mpi.data.plan.context_parallel import check_chunks_fit, split_longest
from odc_mpi.data.plan.cost import CostModel
from odc_mpi.data.plan.rank_independent_packing import rank_independent_packing
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean

IGNORED_LABEL = -100  # the default `ignore_index` of torch's cross entropy


@dataclass(frozen=True)
class Microbatch:
    """A microbatch: sequences one behind the other, without padding.

    Attributes:
        inputs: Arguments of a Hugging Face causal model. `input_ids`, `position_ids` (from 0 in each sequence) and
            `labels`, all int64 [1, T]; `cu_seq_lens_q` and `cu_seq_lens_k`, int32 [num_sequences + 1], where sequences
            begin and end; `max_length_q` and `max_length_k`, ints; `use_cache`, False: only then do attention
            implementations without bounds keep the sequences apart, by their positions. Labels are -100 on what is not
            trained and on each sequence's first token, so that a model that shifts them never predicts it from
            another sequence.
        num_tokens: Trained tokens: labels that are not -100.
        num_input_tokens: T.
        indices: Sequences in the data set, int64 [num_sequences].
        is_chunk: Whether it is a part of one sequence, whose other parts are on other ranks.
    """

    inputs: dict[str, Any]
    num_tokens: int
    num_input_tokens: int
    indices: npt.NDArray[np.int64]
    is_chunk: bool = False

    def to(self, device: torch.device) -> "Microbatch":
        """Return the batch with its tokens on a device; the bounds of sequences stay on the host."""
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
    """The sequences of one optimizer step, over all ranks; iterating reads and yields this rank's batches.

    A plan with a pool has microbatches that free ranks draw. Then iterating is an error, since it would leave out the
    pool silently; use `batches`.

    Attributes:
        data_epoch: Passes over the data set before this one.
        position: Sequences of this data epoch before this minibatch.
        indices: Sequences in the data set, over all ranks, int64 [n].
        num_tokens: Trained tokens over all ranks, the divisor of a sum of losses.
        num_input_tokens: Tokens over all ranks.
        plan: Which rank computes what, as positions in `indices`.
        rank: The rank whose batches iterating yields.
        dataset: The data set of the sequences.
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
        """Return the minibatch of some sequences; nothing is read from the file yet."""
        num_tokens, num_input_tokens = dataset.num_trained_tokens[indices].sum(), dataset.lengths[indices].sum()
        return cls(data_epoch, position, indices, int(num_tokens), int(num_input_tokens), plan, rank, dataset)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Number of fixed microbatches of each rank, with empty ones; 0 under `dynamic`."""
        return tuple(len(microbatches) for microbatches in self.plan.microbatches)

    def __iter__(self) -> Iterator[Microbatch]:
        if self.plan.splits:
            raise UserError(
                "a minibatch with sequences in pieces needs ranks that exchange keys and values, as in odc-mpi train: "
                "set data.context_parallel to off"
            )
        if self.plan.pool:
            raise UserError(
                "a minibatch that leaves microbatches to whoever is free needs tickets: iterate over "
                "minibatch.batches(tickets.draw), or set data.balance to lb_mini"
            )
        return self._fixed()

    def _fixed(self) -> Iterator[Microbatch]:
        # Ranks do not meet in microbatches, so this rank can skip an empty one.
        for positions in filter(None, self.plan.microbatches[self.rank]):
            yield read_microbatch(self.dataset, self.indices[list(positions)])

    def dummy_microbatches(self) -> Iterator[Microbatch]:
        """Yield the shortest sequence as often as another rank has more microbatches than this one.

        For training in which ranks meet in each microbatch; losses and gradients of the padding must not count.
        """
        turns = [sum(map(bool, microbatches)) for microbatches in self.plan.microbatches]
        shortest = int(self.dataset.lengths[self.indices].argmin())
        for _ in range(max(turns) - turns[self.rank]):
            yield read_microbatch(self.dataset, self.indices[shortest : shortest + 1])

    def microbatches(self, claim: Callable[[int], Iterable[int]]) -> Iterator[Microbatch]:
        """Yield this rank's fixed batches, then the batches that it draws from the pool.

        A position is drawn only when the batch before it has been worked through. Local, but for what `draw` does.

        Args:
            claim: Given the length of the pool, yields positions in it that no other rank gets (`Tickets.draw`).
        """
        yield from self._fixed()
        pool = self.plan.pool
        for position in claim(len(pool)) if pool else ():
            yield read_microbatch(self.dataset, self.indices[list(pool[position])])


def read_microbatch(dataset: Dataset, indices: npt.NDArray[np.int64]) -> Microbatch:
    """Read sequences into one microbatch.

    Args:
        dataset: The data set.
        indices: Sequences to read, int64 [num_sequences], at least one.

    Returns:
        The sequences in the given order.
    """
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
    """Read a piece of a sequence into a microbatch, at its positions in the sequence.

    Args:
        dataset: The data set.
        index: The sequence.
        begin: First token of the piece.
        end: Behind its last token.

    Returns:
        A batch whose `inputs` have two more arguments: `shift_labels`, int64 [1, T], the label of each token's
        successor, so that the last token of a piece is trained to predict the first of the next one; and
        `num_items_in_batch`, trained tokens, at least 1: a piece may have none, whose mean loss would be no number.
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
    """Return the bounds of the sequences in a row, as transformers' FlashAttentionKwargs have them."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    # With a cache, which is the default, transformers silently ignores the bounds of sequences.
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest, "use_cache": False}


class ShuffledSampler:
    """Which sequences or prompts each minibatch has, without end. Its state is the position of the next minibatch.

    Each data epoch shuffles the data set anew and goes through it once; its last minibatch may be smaller. The order
    depends on the seed and the data epoch only, so a run resumes on another number of ranks with the same minibatches.

    Args:
        dataset: The caller closes it.
        num_samples: Sequences or prompts in a minibatch, over all ranks.
        seed: Of the shuffle.
    """

    def __init__(self, dataset: Dataset | PromptDataset, num_samples: int, seed: int) -> None:
        self._dataset: Any = dataset
        self._num_samples, self._seed = num_samples, seed
        self._move_to(0, 0)

    def state_dict(self) -> dict[str, int]:
        """Return the position of the next minibatch. Local; the same on every rank.

        Returns:
            `data_epoch`, and `position`, the number of its sequences or prompts that were drawn already.
        """
        return {"data_epoch": self._data_epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at the position of a `state_dict`.

        Args:
            state_dict: A `state_dict` for the same data set and seed.

        Raises:
            UserError: The data set has no such position, so it is not the same.
        """
        data_epoch, position = state["data_epoch"], state["position"]
        if data_epoch < 0 or not 0 <= position < len(self._dataset):
            raise UserError(
                f"expected a position from 0 to {len(self._dataset) - 1} in {str(self._dataset.path)!r}, got "
                f"{position} of data epoch {data_epoch} from the checkpoint: set data.path to what it was trained on"
            )
        self._move_to(data_epoch, position)

    def _next_indices(self) -> tuple[dict[str, int], npt.NDArray[np.int64]]:
        """Move on; return the position before that, and the sequences or prompts of the minibatch there."""
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
    """An endless iterator over minibatches, in the order of `ShuffledSampler`.

    Attributes:
        cost: Cost of a sequence; may be set, to the same on every rank, for later minibatches.
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
            dataset: The data set; the caller closes it.
            minibatch_sequences: Sequences in a minibatch over all ranks.
            max_tokens_per_microbatch: The most tokens in a microbatch.
            strategy: A name among `BALANCE_STRATEGIES`.
            seed: Seed of the shuffle; at least 0, the same on every rank.
            rank: The rank whose batches the minibatches yield.
            size: Number of ranks.
            cost_model: Cost of a sequence.
            context_parallel: Whether sequences may be cut into pieces; with the balance `dynamic`, and not `exact`.
            exact: Whether microbatches are to be the same on any number of ranks, and whatever `cost` becomes.

        Raises:
            UserError: A setting is out of range, or a sequence fits into no microbatch.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        whole = rank_independent_packing(balance, cost) if exact else _find_strategy(balance)
        self._strategy = split_longest if context_parallel else whole
        for setting, value, minimum in (
            ("data.minibatch_sequences", minibatch_sequences, 1),
            ("data.max_tokens_per_microbatch", max_tokens_per_microbatch, 1),
            ("run.seed", seed, 0),
        ):
            if value < minimum:
                raise UserError(f"expected {setting} of at least {minimum}, got {value}")
        # Now, not in the middle of the training.
        if context_parallel:
            check_chunks_fit(dataset.lengths, size, max_tokens_per_microbatch)
        else:
            check_fit(dataset.lengths, max_tokens_per_microbatch)
        super().__init__(dataset, minibatch_sequences, seed)
        self._max_tokens = max_tokens_per_microbatch
        self._rank, self._size = rank, size
        self.cost = cost

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Minibatch:
        """Draw the next minibatch and plan it; nothing is read from the file yet."""
        position, indices = self._next_indices()
        plan = self._strategy(self._dataset.lengths[indices], self._size, self._max_tokens, self.cost)
        return Minibatch.from_indices(self._dataset, indices, plan, self._rank, **position)


def _find_strategy(name: str) -> BalanceStrategy:
    """Return the balance of a name."""
    if name not in BALANCE_STRATEGIES:
        hint = did_you_mean(name, BALANCE_STRATEGIES)
        raise UserError(f"expected data.balance among {', '.join(BALANCE_STRATEGIES)}, got {name!r}{hint}")
    return BALANCE_STRATEGIES[name]
