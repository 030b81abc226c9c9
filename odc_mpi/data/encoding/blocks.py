"""Tokenizing blocks of records, in this process or in several worker processes.

Worker processes are spawned, not forked, because a fork would copy h5py's locks and the thread pool of the library
tokenizers in an invalid state.
"""

import hashlib
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from odc_mpi.data.chat.templates import SplitTurns
from odc_mpi.data.dataset.format import Kind
from odc_mpi.data.encoding.encode import Encoded, encode
from odc_mpi.data.encoding.groups import encode_groups
from odc_mpi.data.examples import Example, ExampleGroup
from odc_mpi.data.records.block import Block, to_record
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.records.schema import Columns, ignored_fields
from odc_mpi.data.tokenizer import load_files
from odc_mpi.errors import UserError

_BATCH_EXAMPLES = 256  # tokenized in one call: enough for its threads, but few enough to limit the memory of offsets
_MAX_EXAMPLES = 3  # of invalid records that are reported
_SPLIT_TURNS = "one sequence for each answer (--split-turns)"
_EncodeFn = Callable[[list[Any]], list[list[Encoded]]]
_AHEAD = 4  # blocks per process that are submitted before the result of the first is needed


@dataclass(frozen=True)
class SequenceFilter:
    """Options that control how `prepare` treats long sequences and conversations, and which sequences it holds out."""

    max_length: Annotated[int | None, "longest sequence; default: no limit", "TOKENS"] = None
    overlong: Annotated[
        Literal["truncate", "drop", "split"],
        "treatment of longer sequences; split: plain text only, into consecutive sequences",
    ] = "truncate"
    eval_fraction: Annotated[float, "fraction to hold out in NAME.eval.h5, e.g. 0.02", "F"] = 0.0
    split_turns: Annotated[
        SplitTurns,
        "write one sequence for each answer of a conversation; auto: if the chat template changes earlier answers",
    ] = "auto"


@dataclass
class FilterCounts:
    """Counts of invalid records, of truncated, split and dropped sequences, and of their tokens.

    Attributes:
        num_bad_lines, bad_lines: Number of invalid records, and the error messages for the first three.
        num_truncated: Number of sequences that were truncated to the maximum length and not dropped afterward.
        num_dropped: Number of sequences that were dropped because they are longer than the maximum length: all of them
            with `overlong="drop"`, otherwise those without loss tokens within this length.
        num_untrained_dropped: Number of examples that were dropped because they have no loss tokens at any length.
        num_split: Number of plain texts that were split.
        notes: Numbers of examples, keyed by what the report says about them: the notes of `Encoded`, ignored fields,
            and conversations that became several sequences.
    """

    num_bad_lines: int = 0
    bad_lines: list[str] = field(default_factory=list)
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    num_split: int = 0
    num_dropped: int = 0
    num_dropped_tokens: int = 0
    num_untrained_dropped: int = 0
    notes: dict[str, int] = field(default_factory=dict)

    def add(self, other: "FilterCounts") -> None:
        """Add the counts of `other`."""
        for each in fields(FilterCounts):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            is_counter = isinstance(mine, dict)
            setattr(self, each.name, dict(Counter(mine) + Counter(others)) if is_counter else mine + others)
        self.bad_lines = self.bad_lines[:_MAX_EXAMPLES]


@dataclass(frozen=True)
class EncodedBlock:
    """A block's sequences for training, and its held-out sequences.

    `kinds` maps each kind of example to the location of the first one. A block of several kinds has no sequences.
    """

    sequences: tuple[list[Encoded], list[Encoded]]
    counts: FilterCounts
    kinds: Mapping[Kind, str] = field(default_factory=dict)


def encode_block(tokenizer: Any, sequence_filter: SequenceFilter, block: Block, columns: Columns) -> EncodedBlock:
    """Tokenize the examples in a block, and filter the sequences. The result does not depend on other blocks."""
    counts = FilterCounts()
    invalid: dict[int, str] = {}
    examples: dict[int, Example | ExampleGroup] = {}
    kinds: dict[Kind, str] = {}
    ignored: dict[int, list[str]] = {}
    for i, (location, value) in enumerate(block.records()):
        try:
            record = to_record(value, location)
            example = parse_example(record, location, columns)
        except InvalidRecordError as error:
            invalid[i] = str(error)
            continue
        kinds.setdefault(example.kind, location)
        if example.has_loss:
            examples[i], ignored[i] = example, ignored_fields(record, columns)
        else:
            counts.num_untrained_dropped += 1
    sequences: tuple[list[Encoded], list[Encoded]] = ([], [])
    if len(kinds) > 1:
        examples.clear()
    encode_batch: _EncodeFn = partial(encode_groups, tokenizer)
    if "sequences" in kinds:
        encode_batch = partial(encode, tokenizer, split_turns=sequence_filter.split_turns)
    notes: Counter[str] = Counter()
    for i, parts in _encode_all(encode_batch, examples, invalid):
        fields_of_record = (f"ignored: `{name}`" for name in ignored[i])
        of_example = {*parts[0].notes, *fields_of_record, *([_SPLIT_TURNS] if len(parts) > 1 else [])}
        notes.update(sorted(of_example))  # the order in the file must not depend on the hashes of this process
        # The last part ends with the last trained answer.
        tokens = parts[-1].truncate(sequence_filter.max_length).tokens
        held_out = is_held_out(tokens, sequence_filter.eval_fraction)
        for sequence in parts:
            sequences[held_out].extend(_fit(sequence, sequence_filter, counts))
    counts.notes = dict(notes)
    counts.num_bad_lines, counts.bad_lines = len(invalid), [invalid[i] for i in sorted(invalid)[:_MAX_EXAMPLES]]
    return EncodedBlock(sequences, counts, kinds)


def _encode_all(
    encode_batch: _EncodeFn, examples: Mapping[int, Any], invalid: dict[int, str]
) -> Iterator[tuple[int, list[Encoded]]]:
    """Tokenize examples in batches. Yields the key and the sequences of each; `invalid` gets the messages of others."""
    indices = list(examples)
    for begin in range(0, len(indices), _BATCH_EXAMPLES):
        batch = indices[begin : begin + _BATCH_EXAMPLES]
        try:
            yield from zip(batch, encode_batch([examples[i] for i in batch]), strict=True)
        except InvalidRecordError:
            for i in batch:
                try:
                    yield i, encode_batch([examples[i]])[0]
                except InvalidRecordError as error:
                    invalid[i] = str(error)


def _fit(sequence: Encoded, sequence_filter: SequenceFilter, counts: FilterCounts) -> Iterator[Encoded]:
    """Yield the sequence, truncated or split if necessary, unless it is dropped. Updates `counts`."""
    limit = sequence_filter.max_length or sequence.length
    fitting = [sequence.truncate(limit)]
    is_lost = sequence_filter.overlong == "drop" or (sequence.has_loss and not fitting[0].has_loss)
    if sequence.length > limit and is_lost:
        counts.num_dropped += 1
        counts.num_dropped_tokens += sequence.num_tokens
        return
    if sequence.length > limit and sequence_filter.overlong == "split" and sequence.is_plain_text:
        fitting = _split(sequence.tokens, starts_with_bos=sequence.starts_with_bos, limit=limit)
        counts.num_split += 1
    elif sequence.length > limit:
        counts.num_truncated += 1
        counts.num_truncated_tokens += sequence.num_tokens - fitting[0].num_tokens
    for each in fitting:
        if each.has_loss:
            yield each
        else:
            counts.num_untrained_dropped += 1


def _split(tokens: npt.NDArray[np.uint32], *, starts_with_bos: bool, limit: int) -> list[Encoded]:
    """Split a plain text into sequences of at most `limit` tokens, so that each token except the first has loss once.

    Each sequence begins with a token without loss: the bos token, or the last token of the previous sequence.
    """
    parts = [
        np.concatenate([tokens[:1] if starts_with_bos else tokens[i - 1 : i], tokens[i : i + limit - 1]])
        for i in range(1, len(tokens), limit - 1)
    ]
    return [Encoded.sequence(part, np.arange(len(part)) > 0) for part in parts]


def is_held_out(tokens: npt.NDArray[np.uint32], fraction: float) -> bool:
    """Return True for about `fraction` of all sequences. The result depends only on a sequence's tokens."""
    if not fraction:
        return False
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def encode_blocks(
    blocks: Iterable[tuple[int, Block, Columns]],
    files: Mapping[str, bytes],
    sequence_filter: SequenceFilter,
    num_proc: int,
) -> Generator[tuple[int, EncodedBlock], None, None]:
    """Tokenize blocks in `num_proc` processes, and yield the results in order, each with the index of its source.

    The worker processes end when the generator ends or is closed. Raises a `UserError` if `encode_block` raises one in
    a worker process, or if a worker process ends early.

    Args:
        blocks: Blocks, each with the index of its source and the names of its columns.
        files: Contents of the tokenizer's files, keyed by file name.
    """
    pool = ProcessPoolExecutor(num_proc, get_context("spawn"), _start_worker, (files, sequence_filter))
    due: deque[tuple[int, Future[EncodedBlock]]] = deque()
    try:
        for index, block, columns in blocks:
            with _interrupts_blocked():
                due.append((index, pool.submit(_encode_in_worker, block, columns)))
            if len(due) == _AHEAD * num_proc:
                index, future = due.popleft()
                yield index, future.result()
        for index, future in due:
            yield index, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"a tokenizing process has ended early: is there enough memory for --num-proc {num_proc}?"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in the `with` body and in processes started there, so that only this process handles Ctrl-C."""
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: `encode_block` with the tokenizer and the filter of a worker process.
_encode: Callable[[Block, Columns], EncodedBlock]


def _start_worker(files: Mapping[str, bytes], sequence_filter: SequenceFilter) -> None:
    global _encode
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # One thread per process: there are as many processes as cores.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    _encode = partial(encode_block, load_files(files), sequence_filter)


def _exit_with_parent() -> None:
    """Exit when the parent process has ended, since the pipes of the pool would keep this process alive."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(block: Block, columns: Columns) -> EncodedBlock:
    return _encode(block, columns)
