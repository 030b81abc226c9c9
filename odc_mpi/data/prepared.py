"""What became of a source: the counts of a prepared data set, in words. Local."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odc_mpi.data.tokenizer import directory_beside


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

    def describe(self) -> str:
        """Return the report in lines for people. Local."""
        origin = f"from {self.tokenizer}"
        if self.trained_on:
            origin = f"trained on {self.trained_on}, with a plain chat template (ChatML)"
        lines = [
            f"{self.path}: {self.num_sequences:,} sequences, {self.num_tokens:,} tokens ({self.num_trained_tokens:,} "
            f"trained), the longest {self.longest:,}",
            f"tokenizer: {self.vocab_size:,} tokens, {origin}, stored in {self.path}",
        ]
        if self.eval_path is not None:
            held_out = f"{self.num_eval_sequences:,} sequences, {self.num_eval_trained_tokens:,} tokens that count"
            lines.insert(1, f"{self.eval_path}: held out, {held_out}")
        unused = directory_beside(self.path)
        if self.tokenizer == self.path and unused.is_dir():
            lines.append(f"{unused}, where older versions wrote the tokenizer, is not used for this data set")
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
