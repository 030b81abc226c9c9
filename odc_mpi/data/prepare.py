"""`odc-mpi prepare`: tokenize text into a data set.

The steps are: find the sources (`sources`), load or train the tokenizer (`tokenizer`), tokenize blocks of examples in
one or more processes (`encode_block`), and write the data set (`dataset`) together with the tokenizer's files. Files
are written atomically, and replace only data sets (`outputs`). They are identical for any number of processes.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.progress import Progress

from odc_mpi import __version__
from odc_mpi.data.dataset.format import Kind, vocabulary_digest
from odc_mpi.data.dataset.reader import find_counts, read_origin
from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.data.encoding.blocks import EncodedBlock, SequenceFilter, encode_block, encode_blocks
from odc_mpi.data.examples import ExampleGroup, PromptCompletion
from odc_mpi.data.outputs import check_outputs, write_error
from odc_mpi.data.prepare_report import PrepareReport
from odc_mpi.data.records.block import Block
from odc_mpi.data.records.fields import InvalidRecordError
from odc_mpi.data.records.parse import parse_example
from odc_mpi.data.records.schema import Columns, check_columns
from odc_mpi.data.sources import DataSource, find_sources, mix
from odc_mpi.data.tokenizer import (
    MAX_VOCAB_SIZE,
    MIN_VOCAB_SIZE,
    load_files,
    read_chat_template,
    replace_chat_template,
    serialize_tokenizer,
    set_chat_template,
    tokenizer_files,
    train_tokenizer,
)
from odc_mpi.errors import UserError
from odc_mpi.files import atomic_write
from odc_mpi.formatting import printable_text, truncate_text

_WORTH_PROCESSES = 32 << 20  # bytes of text; with less, one process is nearly done before others start
_MAX_NAMES = 3
_KINDS: dict[Kind, str] = {
    "sequences": "an example without chosen and rejected, and without a label that is true or false",
    "pairs": "a pair of answers",
    "labels": "an answer with a label",
}
_MAX_PROCESSES = 1024


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(SequenceFilter):
    """Options for `prepare`, each with its help text for the command line and, if necessary, a name for its value.

    For details, see `templates.ChatRenderer` (`split_turns`), `examples.Columns` (`columns`), `arrow.load` (`split`)
    and `sources.mix` (`stopping_strategy`).
    """

    force: Annotated[bool, "replace a data set that was made from other sources"] = False
    tokenizer: Annotated[
        Path | None, "directory, name on the hub, or data set; default: train a tokenizer", "DIR|NAME|DATA.h5"
    ] = None
    chat_template: Annotated[Path | None, "Jinja template that replaces that of the tokenizer", "FILE"] = None
    bad_lines: Annotated[Literal["error", "skip"], "treatment of invalid lines"] = "error"
    columns: Annotated[Mapping[str, str], "names of the fields in SOURCE", "FIELD=NAME,..."] = field(
        default_factory=dict
    )
    split: Annotated[str | None, "split of a Hugging Face data set; default: train, or its only split", "NAME"] = None
    vocab_size: Annotated[int, "vocabulary size of a trained tokenizer", "VOCAB_SIZE"] = 4096
    seed: Annotated[int, "seed for sampling from sources with weights", "SEED"] = 0
    stopping_strategy: Annotated[
        Literal["first_exhausted", "all_exhausted"],
        "end of a weighted mixture: before an example is used twice, or when each has been used",
    ] = "first_exhausted"
    num_proc: Annotated[int | None, "processes; default: the available cores, 1 for little text", "N"] = None

    def check(self) -> None:
        """Raise a `UserError` if an option is out of range."""
        check_columns(self.columns)
        if not 0 <= self.eval_fraction < 1:
            raise UserError(f"expected --eval-fraction of 0 or more and below 1, got {self.eval_fraction:g}")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"expected --max-length of at least 2, got {self.max_length}")
        if self.tokenizer is None and not MIN_VOCAB_SIZE <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise UserError(f"expected --vocab-size from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}, got {self.vocab_size}")
        if self.num_proc is not None and not 1 <= self.num_proc <= _MAX_PROCESSES:
            raise UserError(f"expected --num-proc from 1 to {_MAX_PROCESSES}, got {self.num_proc}")


def prepare(
    source_specs: Sequence[str], out: Path, options: PrepareOptions | None = None, console: Console | None = None
) -> PrepareReport:
    """Tokenize sources and write a data set.

    An existing, undamaged data set is kept if it was made with the same options and versions from unchanged sources.
    Raises a `UserError` if the arguments, sources or tokenizer are invalid, or if a file cannot be read or written.

    Args:
        source_specs: Sources, each optionally followed by a colon and a weight; see `sources.find_sources`.
        out: New file, or data set to replace (see `PrepareOptions.force`). An existing file is kept if an error occurs.
        console: Console for a progress bar and notes on replaced files; None for no output.
    """
    try:
        return _prepare(_Plan(source_specs, out, options or PrepareOptions()), console)
    except OSError as error:
        raise write_error(error, out) from error


def _prepare(plan: "_Plan", console: Console | None) -> PrepareReport:
    if (counts := find_counts(plan.output_paths, plan.request)) is not None:
        return plan.report(counts)
    with ExitStack() as stack, Progress(console=console, disable=console is None) as progress:
        for line in plan.replaced if console else ():
            progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        # A link to a data set remains a link.
        paths = [stack.enter_context(atomic_write(each.resolve())) for each in plan.output_paths]
        reader = _Reader(plan.sources, plan.options, progress)
        if plan.options.tokenizer:
            tokenizer = load_files(plan.files, plan.tokenizer_path)
        else:
            tokenizer = train_tokenizer(reader.texts(), plan.options.vocab_size)
        if plan.chat_template is not None:
            set_chat_template(tokenizer, plan.chat_template)
        files = plan.files or serialize_tokenizer(tokenizer)
        return _write(plan, paths, reader, tokenizer, files)


def eval_output_path(out: Path) -> Path:
    """Return the path of the data set with the held-out sequences, such as chats.eval.h5 for chats.h5."""
    return out.with_name(f"{out.stem}.eval{out.suffix}")


class _Plan:
    """Inputs and outputs of a call to `prepare`, checked before any source is read.

    `files` contains the contents of the tokenizer's files, keyed by file name, unless the tokenizer is trained.
    `replaced` contains a line of text for each data set that is replaced, or no longer held out.
    """

    def __init__(self, source_specs: Sequence[str], out: Path, options: PrepareOptions) -> None:
        options.check()
        self.source_specs, self.options = source_specs, options
        self.sources = find_sources(source_specs, options.split)
        self.output_paths = [out, eval_output_path(out)] if options.eval_fraction else [out]
        self.origin = _digest(sorted({source.origin for source in self.sources}))
        self.replaced = check_outputs(self.output_paths, self.sources, options.tokenizer, self.origin, options.force)
        held_out = eval_output_path(out)
        if not options.eval_fraction and held_out.exists() and read_origin(held_out) == self.origin:
            self.replaced.append(
                f"{held_out} was held out by an earlier call, but {out} now contains its sequences: remove it"
            )
        self.tokenizer_path = options.tokenizer or out
        self.files = tokenizer_files(self.tokenizer_path) if options.tokenizer else {}
        self.chat_template = None if options.chat_template is None else read_chat_template(options.chat_template)
        if self.files and self.chat_template is not None:
            self.files = replace_chat_template(self.files, self.chat_template)
        self.request = self._digest_request()

    def _digest_request(self) -> str:
        """Return a digest of the sources (paths, sizes and times), the options, the tokenizer and the versions."""
        choices = asdict(self.options) | {"chat_template": self.chat_template}
        del choices["num_proc"], choices["tokenizer"], choices["force"]
        request = {
            "sources": [[source.weight, source.stamps() or sys.version] for source in self.sources],
            "tokenizer": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(self.files.items())},
            "options": choices,
            "versions": [__version__, *(version(name) for name in ("tokenizers", "transformers"))],
            "report": [each.name for each in fields(PrepareReport)],
        }
        return _digest(request)

    def report(self, counts: Mapping[str, Any], **run: Any) -> PrepareReport:
        return PrepareReport(
            path=self.output_paths[0],
            tokenizer=self.tokenizer_path,
            chat_template=self.options.chat_template,
            trained_on="" if self.options.tokenizer else truncate_text(", ".join(self.source_specs), 200),
            eval_path=self.output_paths[1] if self.options.eval_fraction else None,
            folders=[source.describe_folder() for source in self.sources if source.is_folder],
            **counts,
            **run,
        )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write(
    plan: _Plan, paths: Sequence[Path], reader: "_Reader", tokenizer: Any, files: Mapping[str, bytes]
) -> PrepareReport:
    options, begin = plan.options, time.monotonic()
    little = sum(source.num_text_bytes for source in plan.sources) < _WORTH_PROCESSES
    num_proc = options.num_proc or (1 if little else len(os.sched_getaffinity(0)))
    shares = [[source.name, 0, 0] for source in plan.sources]
    report = plan.report({"vocab_size": len(tokenizer), "shares": shares}, num_proc=num_proc)
    kinds: dict[Kind, str] = {}
    with ExitStack() as stack:
        names = printable_text(", ".join(Path(source.name).name for source in plan.sources))
        attributes: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "vocabulary": vocabulary_digest(tokenizer.get_vocab()),
            "tokenizer": printable_text(plan.tokenizer_path.resolve().name),
            "source": truncate_text(names, 200),
        }
        writers = [stack.enter_context(DatasetWriter(path, tokenizer_files=files, **attributes)) for path in paths]
        blocks = reader.blocks("tokenizing", lambda: sum(writer.num_tokens for writer in writers))
        results: Iterable[tuple[int, EncodedBlock]]
        if num_proc == 1:
            results = ((index, encode_block(tokenizer, options, block, columns)) for index, block, columns in blocks)
        else:
            results = stack.enter_context(closing(encode_blocks(blocks, files, options, num_proc)))
        for index, result in results:
            if result.counts.bad_lines:
                _check_skipped(result.counts.bad_lines[0], options)
            _check_kinds(kinds, result)
            report.add_block(index, result)
            for writer, sequences in zip(writers, result.sequences, strict=False):
                for sequence in sequences:
                    writer.append(sequence.tokens, sequence.loss_mask, sequence.columns)
        _check_counts([writer.num_sequences for writer in writers], plan, report)
        counts = report.finish(*writers)
        for writer in writers:
            writer.set_attributes(request=plan.request, sources=plan.origin, report=json.dumps(counts))
            writer.set_attributes(**{name: counts[name] for name in ("num_untrained_dropped", "num_bad_lines")})
    report.elapsed_s = time.monotonic() - begin
    return report


def _check_skipped(message: str, options: PrepareOptions) -> None:
    if options.bad_lines != "skip":
        raise UserError(f"{message}. To skip such lines, use --bad-lines skip")


def _check_kinds(kinds: dict[Kind, str], block: EncodedBlock) -> None:
    """Raise a `UserError` if examples of several kinds are mixed. Adds `block.kinds` to those of earlier blocks."""
    for kind, location in block.kinds.items():
        kinds.setdefault(kind, location)
        if other := next((each for each in kinds if each != kind), None):
            raise UserError(
                f"{location}: got {_KINDS[kind]}, but {kinds[other]} is {_KINDS[other]}: prepare them separately, or "
                "select the fields of one kind with --columns"
            )


def _check_counts(counts: Sequence[int], plan: _Plan, report: PrepareReport) -> None:
    if not sum(counts):
        names = ", ".join(map(repr, plan.source_specs[:_MAX_NAMES]))
        raise UserError(f"no sequences to write from {names}{report.explain(plan.options.max_length)}")
    if not all(counts):
        raise UserError(
            f"expected sequences for training and for evaluation, got {' and '.join(map(str, counts))}: change "
            "--eval-fraction"
        )


class _Reader:
    """Reader for the sources, with a progress bar. The sources can be read several times."""

    def __init__(self, sources: Sequence[DataSource], options: PrepareOptions, progress: Progress) -> None:
        self._mixture = mix(sources, options.seed, options.stopping_strategy)
        self._columns, self._options, self._progress = options.columns, options, progress

    def blocks(self, description: str, num_tokens: Callable[[], int]) -> Iterator[tuple[int, Block, Columns]]:
        """Yield blocks, each with the index and the columns of its source. The progress bar displays `num_tokens()`."""
        total = self._mixture.num_bytes or None
        task, begin = self._progress.add_task(description, total=total), time.monotonic()
        for index, block in self._mixture.read(lambda num_bytes: self._progress.advance(task, num_bytes)):
            yield index, block, self._mixture.sources[index].columns(self._columns)
            if tokens_so_far := num_tokens():
                rate = tokens_so_far / (time.monotonic() - begin)
                self._progress.update(task, description=f"{description}, {rate:,.0f} tokens/s")
        self._progress.update(task, total=total or 1, completed=total or 1)

    def texts(self) -> Iterator[str]:
        """Yield the texts for training a tokenizer. Skipped lines are counted later, when examples are tokenized."""
        for _, block, columns in self.blocks("reading for the tokenizer", lambda: 0):
            for location, value in block.records():
                try:
                    example = parse_example(value, location, columns)
                except InvalidRecordError as error:
                    _check_skipped(str(error), self._options)
                    continue
                for each in example.examples if isinstance(example, ExampleGroup) else [example]:
                    if isinstance(each, PromptCompletion):
                        yield from (each.prompt, each.completion)
                    else:
                        yield from (message["content"] for message in each.messages)
