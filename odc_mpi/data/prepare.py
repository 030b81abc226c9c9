"""From text to a file of tokens: what `odc-mpi prepare` does.

Reads the source (`stdlib`, `jsonl`), loads the tokenizer or trains one (`tokenizer`), tokenises in batches (`encode`),
cuts what is too long, and writes a data set (`dataset`) with the tokenizer's files in it, which appears complete or not
at all; beside it another one of sequences that are held out, if that is asked for. One process, no communication.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from odc_mpi.data import jsonl, stdlib
from odc_mpi.data.dataset import DatasetWriter, vocabulary_digest
from odc_mpi.data.encode import Encoded, encode
from odc_mpi.data.jsonl import BadLine, BadLines, Example, Fields, Pair
from odc_mpi.data.prepared import PrepareReport
from odc_mpi.data.tokenizer import (
    DIRECTORY_SUFFIX,
    MIN_VOCAB_SIZE,
    files_of,
    find_tokenizer,
    load_tokenizer,
    tokenizer_files,
    train_tokenizer,
)
from odc_mpi.errors import UserError
from odc_mpi.files import replacing

STDLIB = "stdlib"
_BATCH_EXAMPLES = 256  # tokenised in one call: enough for its threads, little enough for its offsets


def prepare(
    source: str,
    out: Path,
    *,
    tokenizer: Path | None = None,
    max_length: int | None = None,
    overlong: Literal["truncate", "drop"] = "truncate",
    prompt_field: str = "prompt",
    completion_field: str = "completion",
    vocab_size: int = 4096,
    bad_lines: Literal["error", "skip"] = "error",
    eval_fraction: float = 0.0,
    console: Console | None = None,
) -> PrepareReport:
    """Tokenise a source into a data set, in one process, before the training. Local.

    Args:
        source: The word "stdlib", or the path of a JSONL file; gzipped if it ends in .gz.
        out: File to write. If anything goes wrong, it stays as it was.
        tokenizer: Directory of a tokenizer, or a data set that holds one. None trains one on the source.
        max_length: The most tokens in a sequence; None for no limit.
        overlong: Whether to truncate or to drop longer sequences.
        prompt_field: Field of a line that holds the prompt; required if it is not "prompt".
        completion_field: Field of a line that holds the completion; required if it is not "completion".
        vocab_size: The most tokens of a trained tokenizer.
        bad_lines: Whether a line that cannot be used is an error, or is skipped and counted.
        eval_fraction: About so much of the sequences is held out in a data set beside `out`, `eval_path_of(out)`. Which
            depends on their tokens alone: equal ones stay together, and where they are when others come.
        console: Console for a progress bar; None for no bar. The caller prints the report.

    Returns:
        The counts of the data set.

    Raises:
        UserError: The arguments, the source or the tokenizer are wrong; nothing was written.
    """
    limit = _Limit(max_length, overlong)
    if not 0 <= eval_fraction < 1:
        raise UserError(f"expected --eval-fraction of 0 or more and below 1, got {eval_fraction:g}")
    outs = [out, eval_path_of(out)] if eval_fraction else [out]
    for path in outs:
        _check_request(source, path, tokenizer, limit, vocab_size)
    if bad_lines not in ("error", "skip"):
        raise UserError(f"expected --bad-lines error or skip, got {bad_lines!r}")
    bad = BadLines(skip=bad_lines == "skip")
    with ExitStack() as stack, Progress(console=console, disable=console is None) as progress:
        paths = [stack.enter_context(_new_file(each)) for each in outs]
        read = _open_source(source, Fields(prompt_field, completion_field), progress)
        if tokenizer is None:
            place = out
            # Lines that are skipped are counted by the second reading.
            loaded = train_tokenizer(_texts(read("reading for the tokenizer", BadLines(bad.skip))), vocab_size)
            files = files_of(loaded)
        else:
            place = find_tokenizer(tokenizer)
            loaded, files = load_tokenizer(place), tokenizer_files(place)
        with ExitStack() as open_writers:
            writers = [open_writers.enter_context(_writer(path, loaded, files, place, source)) for path in paths]
            examples = limit.trainable(read("tokenising", bad))
            for sequence in limit.apply(_encode_all(loaded, examples, bad)):
                writers[_is_held_out(sequence.tokens, eval_fraction)].append(sequence.tokens, sequence.loss_mask)
            for writer in writers:
                writer.note(num_untrained_dropped=limit.num_untrained_dropped, num_bad_lines=bad.num_skipped)
        _check_counts([each.num_sequences for each in writers], f"{source!r}", limit.explain(bad))
    writer, *others = writers
    return PrepareReport(
        path=out,
        tokenizer=place,
        trained_on="" if tokenizer else source,
        num_sequences=writer.num_sequences,
        num_tokens=writer.num_tokens,
        num_trained_tokens=writer.num_trained_tokens,
        num_truncated=limit.num_truncated,
        num_dropped=limit.num_dropped,
        num_untrained_dropped=limit.num_untrained_dropped,
        num_bad_lines=bad.num_skipped,
        bad_lines=bad.first,
        longest=writer.longest,
        vocab_size=len(loaded),
        eval_path=outs[1] if others else None,
        num_eval_sequences=sum(each.num_sequences for each in others),
        num_eval_trained_tokens=sum(each.num_trained_tokens for each in others),
    )


def _writer(path: Path, tokenizer: Any, files: Mapping[str, bytes], place: Path, source: str) -> DatasetWriter:
    return DatasetWriter(
        path,
        vocab_size=len(tokenizer),
        vocabulary=vocabulary_digest(tokenizer.get_vocab()),
        tokenizer=place.resolve().name,
        tokenizer_files=files,
        source=Path(source).name,
    )


def _check_counts(counts: Sequence[int], source: str, reason: str) -> None:
    """Refuse a data set without a sequence."""
    if not sum(counts):
        raise UserError(f"expected sequences to write from {source}, got none{reason}")
    if not all(counts):
        raise UserError(
            f"expected sequences to train on and some that are held out, got {' and '.join(map(str, counts))}: change "
            "--eval-fraction"
        )


def eval_path_of(out: Path) -> Path:
    """Return where the sequences go that a data set leaves out for evaluation: chats.eval.h5 beside chats.h5. Local."""
    return out.with_name(f"{out.stem}.eval{out.suffix}")


def _is_held_out(tokens: npt.NDArray[np.uint32], fraction: float) -> bool:
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


@contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """Offer a path to write to, which becomes `out` at the end."""
    with ExitStack() as stack:
        try:
            path = stack.enter_context(replacing(out))
        except OSError as error:
            raise UserError(
                f"expected OUT in a folder that can be written, got {str(out)!r} ({error}): change OUT"
            ) from error
        yield path


def _texts(examples: Iterable[Example]) -> Iterator[str]:
    """Yield what a tokenizer is trained on."""
    for example in examples:
        if isinstance(example, Pair):
            yield from (example.prompt, example.completion)
        else:
            yield from (message["content"] for message in example.messages)


class _Limit:
    """The maximal length, and counts of what it and the loss mask did to sequences."""

    def __init__(self, max_length: int | None, overlong: str) -> None:
        self.max_length = max_length
        self.overlong = overlong
        self.num_truncated = self.num_dropped = self.num_untrained_dropped = 0

    def trainable(self, examples: Iterable[Example]) -> Iterator[Example]:
        """Yield the examples in which there is something to learn."""
        for example in examples:
            if example.trains:
                yield example
            else:
                self.num_untrained_dropped += 1

    def apply(self, sequences: Iterable[Encoded]) -> Iterator[Encoded]:
        """Yield the sequences to write, truncated where they are too long."""
        for sequence in sequences:
            too_long = self.max_length is not None and len(sequence.tokens) > self.max_length
            if too_long and self.overlong == "drop":
                self.num_dropped += 1
                continue
            if too_long:
                sequence = Encoded(sequence.tokens[: self.max_length], sequence.loss_mask[: self.max_length])
            if not sequence.loss_mask[1:].any():
                self.num_untrained_dropped += 1
                continue
            self.num_truncated += too_long
            yield sequence

    def explain(self, bad: BadLines) -> str:
        """Say why nothing may be left, as the end of a sentence."""
        if not self.num_dropped + self.num_untrained_dropped + bad.num_skipped:
            return ": SOURCE holds none"
        unusable = f", {bad.num_skipped} that cannot be used, the first: {bad.first[0]}" if bad.first else ""
        return (
            f" ({self.num_dropped} longer than the maximum, {self.num_untrained_dropped} without a token to learn"
            f"{unusable}): "
            f"{f'raise --max-length (now {self.max_length}) or ' if self.max_length else ''}change SOURCE"
        )


def _check_request(source: str, out: Path, tokenizer: Path | None, limit: _Limit, vocab_size: int) -> None:
    """Refuse wrong arguments before anything is read."""
    if out.is_dir():
        raise UserError(f"expected a file to write as OUT, got the directory {str(out)!r}: change OUT")
    if out.suffix == DIRECTORY_SUFFIX:
        raise UserError(f"expected OUT without the suffix {DIRECTORY_SUFFIX}, got {str(out)!r}: change OUT")
    if limit.max_length is not None and limit.max_length < 2:
        raise UserError(f"expected --max-length of at least 2, got {limit.max_length}")
    if limit.overlong not in ("truncate", "drop"):
        raise UserError(f"expected --overlong truncate or drop, got {limit.overlong!r}")
    if tokenizer is None and vocab_size < MIN_VOCAB_SIZE:
        raise UserError(f"expected --vocab-size of at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    if source == STDLIB:
        return
    if not Path(source).is_file():
        raise UserError(f"expected a JSONL file or the word {STDLIB} as SOURCE, got {source!r}, which is no file")
    if out.exists() and out.samefile(source):
        raise UserError(f"expected OUT to be another file than SOURCE, got {str(out)!r} for both: change OUT")


#: Reads the examples of a source, as often as it is called: with the words beside the bar, and who takes bad lines.
_Read = Callable[[str, BadLines], Iterable[Example]]


def _open_source(source: str, fields: Fields, progress: Progress) -> _Read:
    """Return the function that reads the source."""
    if source != STDLIB:
        return partial(_read_file, source, fields, progress)
    task = progress.add_task("reading the standard library", total=None)
    pairs = [Pair(STDLIB, sample.prompt, sample.completion) for sample in stdlib.functions()]
    progress.update(task, total=len(pairs), completed=len(pairs))
    return lambda description, _: progress.track(pairs, description=description)


def _read_file(
    source: str, fields: Fields, progress: Progress, description: str, bad_lines: BadLines
) -> Iterator[Example]:
    try:
        file = progress.open(source, "rb", description=description)
    except OSError as error:
        raise UserError(f"expected a JSONL file as SOURCE, got {source!r}, which does not open ({error})") from error
    with file:
        yield from jsonl.read(file, source, fields, bad_lines)


def _encode_all(tokenizer: Any, examples: Iterable[Example], bad: BadLines) -> Iterator[Encoded]:
    """Tokenise in batches: fast, and in bounded memory."""
    remaining = iter(examples)
    while batch := list(islice(remaining, _BATCH_EXAMPLES)):
        try:
            encoded = encode(tokenizer, batch)
        except BadLine:
            encoded = list(_encode_singly(tokenizer, batch, bad))
        yield from encoded


def _encode_singly(tokenizer: Any, examples: Iterable[Example], bad: BadLines) -> Iterator[Encoded]:
    """Tokenise one by one, to leave out which the chat template refuses."""
    for example in examples:
        try:
            yield from encode(tokenizer, [example])
        except BadLine as error:
            bad.add(error)
