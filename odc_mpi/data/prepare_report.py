"""Counts of sequences and tokens in a prepared data set, and their display as text."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi.data.dataset.format import UNITS, Kind
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.encoding.blocks import EncodedBlock, FilterCounts
from odc_mpi.formatting import printable_text

_MAX_SHARES = 50  # with more sources, the report omits their shares
_OF_WRITER = (
    *("kind", "num_sequences", "num_tokens", "num_trained_tokens", "num_prompt_tokens", "num_desirable", "longest"),
)
#: Fields of `PrepareReport` that depend on the call, and are not stored in the data set.
_NOT_STORED = ("path", "tokenizer", "trained_on", "chat_template", "eval_path", "folders", "elapsed_s", "num_proc")


@dataclass(kw_only=True)
class PrepareReport(FilterCounts):
    """Counts for a prepared data set, including those of `FilterCounts`.

    Attributes:
        tokenizer: Directory or data set from which the tokenizer was loaded; `path` if the tokenizer was trained.
        trained_on: Sources on which the tokenizer was trained; empty if the tokenizer was loaded.
        num_trained_tokens: Number of loss tokens, not counting the first token of each sequence.
        num_prompt_tokens: Number of tokens in the prompts of pairs; 0 if the sequences are not pairs.
        num_desirable: Number of answers with the label true.
        shares: Name, number of sequences and number of loss tokens of each source, with held-out sequences included.
            Empty unless there are 2 to 50 sources.
        folders: A line of text about the files in each source that is a folder.
        elapsed_s: Time for tokenizing and writing, in seconds; None if the data set was up to date.
    """

    path: Path
    tokenizer: Path
    trained_on: str
    vocab_size: int
    num_sequences: int = 0
    num_tokens: int = 0
    num_trained_tokens: int = 0
    longest: int = 0
    chat_template: Path | None = None
    eval_path: Path | None = None
    num_prompt_tokens: int = 0
    num_desirable: int = 0
    kind: Kind = "sequences"
    num_eval_sequences: int = 0
    num_eval_trained_tokens: int = 0
    shares: list[list[Any]] = field(default_factory=list)
    folders: Sequence[str] = ()
    elapsed_s: float | None = None
    num_proc: int = 1

    def add_block(self, source: int, block: EncodedBlock) -> None:
        """Count the sequences and invalid records in a block. `source` is the index of its source in `shares`."""
        self.add(block.counts)
        share = self.shares[source]
        for sequence in itertools.chain(*block.sequences):
            share[1] += 1
            share[2] += int(np.count_nonzero(sequence.loss_mask[1:]))

    def finish(self, writer: DatasetWriter, *held_out: DatasetWriter) -> dict[str, Any]:
        """Copy the data sets' sizes from the writers, and return the counts to store in the data sets, by name."""
        for name in _OF_WRITER:
            setattr(self, name, getattr(writer, name))
        self.num_eval_sequences = sum(each.num_sequences for each in held_out)
        self.num_eval_trained_tokens = sum(each.num_trained_tokens for each in held_out)
        if not 1 < len(self.shares) <= _MAX_SHARES:
            self.shares = []
        return {name: value for name, value in asdict(self).items() if name not in _NOT_STORED}

    def explain(self, max_length: int | None) -> str:
        """Return the part of an error message that explains why there are no sequences to write."""
        if not self.num_dropped + self.num_untrained_dropped + self.num_bad_lines:
            return ": SOURCE contains no examples"
        skipped = f", {self.num_bad_lines} invalid, the first: {self.bad_lines[0]}" if self.bad_lines else ""
        raise_limit = f"raise --max-length (now {max_length}) or " if max_length else ""
        return (
            f" ({self.num_dropped} longer than the maximum, {self.num_untrained_dropped} without loss tokens, "
            f"which are those of completions and of messages of the role assistant{skipped}): {raise_limit}"
            "change SOURCE"
        )

    def describe(self) -> str:
        """Return the report as several lines of text."""
        origin = f"trained on {self.trained_on}" if self.trained_on else f"from {self.tokenizer}"
        if self.chat_template or self.trained_on:
            origin += f", with {self.chat_template or 'a plain chat template (ChatML)'}"
        tokens = f"{self.num_tokens:,} tokens ({self.num_trained_tokens:,} loss tokens"
        if self.num_prompt_tokens:
            tokens += f", {self.num_prompt_tokens / self.num_tokens:.0%} in prompts, which both answers share"
        if self.kind == "labels":
            tokens += f", {self.num_desirable:,} answers desirable"
        lines = []
        if self.elapsed_s is None:
            lines.append(f"{self.path}: up to date (same sources, options and versions)")
        lines.append(f"{self.path}: {self.num_sequences:,} {self._unit}, {tokens}), longest {self.longest:,}")
        if self.eval_path is not None:
            held_out = f"{self.num_eval_sequences:,} {self._unit}, {self.num_eval_trained_tokens:,} loss tokens"
            lines.append(f"{self.eval_path}: held out {held_out}")
        lines.append(f"tokenizer: {self.vocab_size:,} tokens, {origin}, stored in {self.path}")
        if self.elapsed_s is not None:
            processes = f"{self.num_proc} processes" if self.num_proc > 1 else "one process"
            rate = self.num_tokens / max(self.elapsed_s, 1e-3)
            lines.append(f"tokenized in {self.elapsed_s:.1f} s by {processes}: {rate:,.0f} tokens/s")
        lines += [*self.folders, *self._describe_shares()]
        for count, description in (
            (self.num_split, "texts split into sequences of --max-length"),
            (self.num_truncated, f"truncated to --max-length ({self.num_truncated_tokens:,} tokens lost)"),
            (self.num_dropped, f"dropped: longer than --max-length ({self.num_dropped_tokens:,} tokens lost)"),
            (self.num_untrained_dropped, "dropped: no loss tokens"),
        ):
            if count:
                lines.append(f"{count:,} {description}")
        lines += [f"{note} in {count:,} line{'s' * (count > 1)}" for note, count in sorted(self.notes.items())]
        if self.num_bad_lines:
            lines += [f"{self.num_bad_lines:,} skipped: invalid", *self.bad_lines]
            if more := self.num_bad_lines - len(self.bad_lines):
                lines.append(f"... and {more:,} more")
        return printable_text("\n".join(lines))

    @property
    def _unit(self) -> str:
        return UNITS[self.kind]

    def _describe_shares(self) -> list[str]:
        all_sequences = sum(num_sequences for _, num_sequences, _ in self.shares) or 1
        all_tokens = sum(num_tokens for *_, num_tokens in self.shares) or 1
        return [
            f"{source}: {num_sequences:,} {self._unit} ({num_sequences / all_sequences:.1%}), "
            f"{num_tokens:,} loss tokens ({num_tokens / all_tokens:.1%})"
            for source, num_sequences, num_tokens in self.shares
        ]
