"""From a block of records to tokens: what each process of `odc-mpi prepare` does, with the tokenizer as an argument."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odc_mpi.data.encode import Encoded, encode
from odc_mpi.data.examples import BadLine, Example, Fields, example_of
from odc_mpi.data.sources import Block

_BATCH_EXAMPLES = 256  # tokenised in one call: enough for its threads, little enough for its offsets


@dataclass(frozen=True)
class Limits:
    """Which sequences are written, and where.

    Attributes:
        max_length: The most tokens in a sequence; None for no limit.
        overlong: Whether to truncate or to drop longer sequences.
        eval_fraction: About so much of the sequences is held out.
    """

    max_length: int | None = None
    overlong: Literal["truncate", "drop"] = "truncate"
    eval_fraction: float = 0.0


@dataclass
class Counts:
    """What became of examples.

    Attributes:
        num_truncated: Sequences written that were cut to the maximal length.
        num_dropped: Sequences left out because they were longer than the maximal length.
        num_untrained_dropped: Examples left out because (after cutting) no token is left to learn.
    """

    num_truncated: int = 0
    num_dropped: int = 0
    num_untrained_dropped: int = 0

    def add(self, other: "Counts") -> None:
        """Add the counts of other examples. Local."""
        self.num_truncated += other.num_truncated
        self.num_dropped += other.num_dropped
        self.num_untrained_dropped += other.num_untrained_dropped


@dataclass(frozen=True)
class EncodedBlock:
    """The sequences of a block, and what became of the other records.

    Attributes:
        sequences: To train on, and to hold out, in their order.
        counts: Of the others, and of those that were cut.
        bad: What is wrong with each record that cannot be used, in their order.
    """

    sequences: tuple[list[Encoded], list[Encoded]]
    counts: Counts
    bad: list[str]


def encode_block(tokenizer: Any, block: Block, fields: Fields, limits: Limits) -> EncodedBlock:
    """Tokenise the examples of a block, and sort out what is not to be written. Local.

    The result depends on the records alone, and not on the other blocks.

    Raises:
        UserError: The tokenizer does not serve the examples.
    """
    counts, bad = Counts(), {}
    examples: dict[int, Example] = {}
    for i, (where, record) in enumerate(block.records()):
        try:
            example = example_of(record(), where, fields)
        except BadLine as error:
            bad[i] = str(error)
            continue
        if example.trains:
            examples[i] = example
        else:
            counts.num_untrained_dropped += 1
    sequences: tuple[list[Encoded], list[Encoded]] = ([], [])
    for sequence in _encode_all(tokenizer, examples, bad):
        if (fitting := _fit(sequence, limits, counts)) is not None:
            sequences[is_held_out(fitting.tokens, limits.eval_fraction)].append(fitting)
    return EncodedBlock(sequences, counts, [bad[i] for i in sorted(bad)])


def _encode_all(tokenizer: Any, examples: dict[int, Example], bad: dict[int, str]) -> Iterator[Encoded]:
    """Tokenise in batches; those that the chat template refuses are added to the bad ones."""
    indices = list(examples)
    for begin in range(0, len(indices), _BATCH_EXAMPLES):
        batch = indices[begin : begin + _BATCH_EXAMPLES]
        try:
            yield from encode(tokenizer, [examples[i] for i in batch])
        except BadLine:
            for i in batch:
                try:
                    yield from encode(tokenizer, [examples[i]])
                except BadLine as error:
                    bad[i] = str(error)


def _fit(sequence: Encoded, limits: Limits, counts: Counts) -> Encoded | None:
    """Return a sequence as it is to be written, or None if it is not."""
    too_long = limits.max_length is not None and len(sequence.tokens) > limits.max_length
    if too_long and limits.overlong == "drop":
        counts.num_dropped += 1
        return None
    if too_long:
        sequence = Encoded(sequence.tokens[: limits.max_length], sequence.loss_mask[: limits.max_length])
    if not sequence.loss_mask[1:].any():
        counts.num_untrained_dropped += 1
        return None
    counts.num_truncated += too_long
    return sequence


def is_held_out(tokens: npt.NDArray[np.uint32], fraction: float) -> bool:
    """Draw by the tokens alone: equal sequences stay together, and where they are when others come. Local."""
    if not fraction:
        return False
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
