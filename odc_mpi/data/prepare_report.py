"""What became of the sources: the counts of a prepared data set, in words."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi.data.dataset import DatasetWriter
from odc_mpi.data.encode_block import EncodedBlock, FilterCounts
from odc_mpi.data.examples import InvalidRecordError, InvalidRecords

_MAX_SHARES = 50  # sources; of more the report does not tell each one's share


@dataclass(frozen=True)
class PrepareReport:
    """The counts of a prepared data set.

    Attributes:
        path: The data set.
        tokenizer: Where the tokenizer came from: a directory or a data set; `path` itself if it was trained.
        trained_on: The source that the tokenizer was trained on; empty if it was given.
        num_sequences: Sequences written.
        num_tokens: Tokens in them.
        num_trained_tokens: Tokens in them with loss, without first ones.
        num_truncated: Sequences written that were cut to the maximal length.
        num_dropped: Sequences left out because they were longer than the maximal length.
        num_untrained_dropped: Sequences left out because (after cutting) no token is left to learn.
        num_bad_lines: Lines left out because they cannot be used.
        bad_lines: What is wrong with the first three of them.
        longest: Tokens of the longest sequence written.
        vocab_size: Tokens of the tokenizer.
        eval_path: The data set of what is held out; None if nothing is.
        num_eval_sequences: Sequences in that one.
        num_eval_trained_tokens: Tokens with loss in that one.
        shares: Of several sources each one's name, its sequences, those held out among them, and its trained tokens.
        folders: What was found in each folder, a line for each.
        elapsed_s: Seconds of tokenising and writing; None if the data set was there already.
        num_proc: Processes that tokenised.
    """

    path: Path
    tokenizer: Path
    trained_on: str
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    num_truncated: int
    num_dropped: int
    num_untrained_dropped: int
    num_bad_lines: int
    bad_lines: Sequence[str]
    longest: int
    vocab_size: int
    eval_path: Path | None = None
    num_eval_sequences: int = 0
    num_eval_trained_tokens: int = 0
    shares: Sequence[Sequence[Any]] = ()
    folders: Sequence[str] = ()
    elapsed_s: float | None = None
    num_proc: int = 1

    def describe(self) -> str:
        """Return the report in lines for people."""
        origin = f"from {self.tokenizer}"
        if self.trained_on:
            origin = f"trained on {self.trained_on}, with a plain chat template (ChatML)"
        lines = [
            f"{self.path}: {self.num_sequences:,} sequences, {self.num_tokens:,} tokens ({self.num_trained_tokens:,} "
            f"trained), the longest {self.longest:,}",
            f"tokenizer: {self.vocab_size:,} tokens, {origin}, stored in {self.path}",
        ]
        if self.elapsed_s is None:
            lines.insert(0, f"{self.path}: done before, from the same sources with the same options; nothing to do")
        else:
            lines.append(self._speed(self.elapsed_s))
        lines += self.folders
        if self.eval_path is not None:
            held_out = f"{self.num_eval_sequences:,} sequences, {self.num_eval_trained_tokens:,} tokens that count"
            lines.insert(1 + (self.elapsed_s is None), f"{self.eval_path}: held out, {held_out}")
        lines += self._describe_shares()
        for count, what in (
            (self.num_truncated, "truncated to --max-length"),
            (self.num_dropped, "dropped: longer than --max-length"),
            (self.num_untrained_dropped, "dropped: no token to learn from"),
        ):
            if count:
                lines.append(f"{count:,} {what}")
        if self.num_bad_lines:
            lines += [f"{self.num_bad_lines:,} skipped: cannot be used", *self.bad_lines]
            if more := self.num_bad_lines - len(self.bad_lines):
                lines.append(f"and {more:,} more")
        return "\n".join(lines)

    def _speed(self, elapsed_s: float) -> str:
        processes = f"{self.num_proc} processes" if self.num_proc > 1 else "one process"
        return f"tokenised in {elapsed_s:.1f} s by {processes}: {self.num_tokens / max(elapsed_s, 1e-3):,.0f} tokens/s"

    def _describe_shares(self) -> list[str]:
        all_sequences = sum(num_sequences for _, num_sequences, _ in self.shares) or 1
        all_tokens = sum(num_tokens for *_, num_tokens in self.shares) or 1
        return [
            f"{source}: {num_sequences:,} sequences ({num_sequences / all_sequences:.1%}), "
            f"{num_tokens:,} trained tokens ({num_tokens / all_tokens:.1%})"
            for source, num_sequences, num_tokens in self.shares
        ]


class PrepareStats:
    """Counts while a data set is written.

    Args:
        invalid: Takes the lines that cannot be used.
        sources: The names of the sources.
    """

    def __init__(self, invalid: InvalidRecords, sources: Sequence[str]) -> None:
        self._invalid = invalid
        self._counts = FilterCounts()
        self._shares: list[list[Any]] = [[name, 0, 0] for name in sources]

    def add(self, source: int, block: EncodedBlock) -> None:
        """Count a block of a source.

        Raises:
            UserError: A line cannot be used, and such lines are not to be skipped.
        """
        for message in block.invalid:
            self._invalid.add(InvalidRecordError(message))
        self._counts.add(block.counts)
        share = self._shares[source]
        for sequence in itertools.chain(*block.sequences):
            share[1] += 1
            share[2] += int(np.count_nonzero(sequence.loss_mask[1:]))

    def counts(self, writer: DatasetWriter, *held_out: DatasetWriter) -> dict[str, Any]:
        """Return the counts of a `PrepareReport`, which JSON can hold."""
        return {
            "num_sequences": writer.num_sequences,
            "num_tokens": writer.num_tokens,
            "num_trained_tokens": writer.num_trained_tokens,
            "longest": writer.longest,
            **asdict(self._counts),
            "num_bad_lines": self._invalid.num_skipped,
            "bad_lines": self._invalid.first,
            "num_eval_sequences": sum(each.num_sequences for each in held_out),
            "num_eval_trained_tokens": sum(each.num_trained_tokens for each in held_out),
            "shares": self._shares if 1 < len(self._shares) <= _MAX_SHARES else [],
        }

    def explain(self, max_length: int | None) -> str:
        """Say why nothing may be left, as the end of a sentence."""
        counts, invalid = self._counts, self._invalid
        if not counts.num_dropped + counts.num_untrained_dropped + invalid.num_skipped:
            return ": SOURCE holds none"
        unusable = (
            f", {invalid.num_skipped} that cannot be used, the first: {invalid.first[0]}" if invalid.first else ""
        )
        return (
            f" ({counts.num_dropped} longer than the maximum, {counts.num_untrained_dropped} without a token to learn"
            f"{unusable}): {f'raise --max-length (now {max_length}) or ' if max_length else ''}change SOURCE"
        )
