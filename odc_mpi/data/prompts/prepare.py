"""From records to a file of prompts: what `odc-mpi prepare --prompts-only` does. No communication."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from odc_mpi.data.blocks import is_held_out
from odc_mpi.data.dataset import vocabulary_digest
from odc_mpi.data.encode import encode_prompt
from odc_mpi.data.examples import BadLine, BadLines, prompt_of
from odc_mpi.data.prepare import Options, new_file, outs_of
from odc_mpi.data.prompts.file import PromptRow, PromptsReport, row_of, write_prompts
from odc_mpi.data.sources import Source, find_sources
from odc_mpi.data.tokenizer import find_tokenizer, load_tokenizer, tokenizer_files
from odc_mpi.errors import UserError


def prepare_prompts(words: Sequence[str], out: Path, options: Options) -> PromptsReport:
    """Tokenise prompts into a file, with the columns that rewards need. Local.

    Args:
        words: Each a path of a file or folder of records, without a weight.
        out: File to write. If anything goes wrong, it stays as it was.
        options: Of which `tokenizer` is required; `max_length` leaves longer prompts out.

    Raises:
        UserError: The arguments, the sources or the tokenizer are wrong; nothing was written.
    """
    options.check()
    _check_options(options)
    sources = find_sources(words)
    if any(source.weight is not None for source in sources):
        raise UserError("--prompts-only takes each prompt of its sources once: expected no weights, got some")
    if not all(source.files for source in sources):
        raise UserError("--prompts-only takes prompts from files: expected no source stdlib, got it")
    outs = outs_of(out, options, sources)
    assert options.tokenizer is not None, "checked above"
    place = find_tokenizer(options.tokenizer)
    tokenizer, bad = load_tokenizer(place), BadLines(options.bad_lines == "skip")
    rows = _rows(sources, tokenizer, bad)
    kept = [row for row in rows if options.max_length is None or len(row.tokens) <= options.max_length]
    shares = _shares(kept, options.eval_fraction)
    _check_counts(words, [len(share) for share in shares])
    with ExitStack() as stack:
        for path, share in zip([stack.enter_context(new_file(each)) for each in outs], shares, strict=True):
            write_prompts(
                path,
                share,
                vocab_size=len(tokenizer),
                vocabulary=vocabulary_digest(tokenizer.get_vocab()),
                source=", ".join(Path(source.name).name for source in sources)[:200],
                tokenizer_files=tokenizer_files(place),
            )
    lengths = [len(row.tokens) for row in shares[0]]
    return PromptsReport(
        path=out,
        num_prompts=len(lengths),
        num_tokens=sum(lengths),
        longest=max(lengths),
        columns=sorted({name for row in kept for name in row.columns}),
        num_dropped=len(rows) - len(kept),
        num_bad_lines=bad.num_skipped,
        bad_lines=bad.first,
        eval_path=outs[1] if options.eval_fraction else None,
        num_eval_prompts=len(shares[1]) if options.eval_fraction else 0,
    )


def _check_options(options: Options) -> None:
    if options.tokenizer is None:
        raise UserError("--prompts-only takes the tokenizer of the model: expected --tokenizer DIR, got none")
    if options.prompt_field != "prompt" or options.completion_field != "completion":
        raise UserError(
            "--prompts-only reads the field 'prompt' or 'messages': expected no --prompt-field and --completion-field"
        )
    if options.num_proc not in (None, 1):
        raise UserError(f"--prompts-only tokenises in one process: expected no --num-proc, got {options.num_proc}")


def _rows(sources: Sequence[Source], tokenizer: object, bad: BadLines) -> list[PromptRow]:
    """Read and tokenise all prompts."""
    rows = []
    for source in sources:
        for block in source.read(lambda: 1, lambda _: None):
            for where, parse in block.records():
                try:
                    record = parse()
                    example = prompt_of(record, where)
                    rows.append(row_of(example, record, encode_prompt(tokenizer, example)))
                except BadLine as error:
                    bad.add(error)
    return rows


def _shares(rows: Sequence[PromptRow], eval_fraction: float) -> list[list[PromptRow]]:
    """Split into what is trained on and what is held out."""
    held_out = [is_held_out(np.array(row.tokens, dtype=np.uint32), eval_fraction) for row in rows]
    shares = [[row for row, out in zip(rows, held_out, strict=True) if out is wanted] for wanted in (False, True)]
    return shares if eval_fraction else shares[:1]


def _check_counts(words: Sequence[str], counts: Sequence[int]) -> None:
    if not sum(counts):
        raise UserError(f"expected prompts to write from {', '.join(words)}, got none: change SOURCE or --max-length")
    if not all(counts):
        raise UserError(
            f"expected prompts to train on and some that are held out, got {' and '.join(map(str, counts))}: change "
            "--eval-fraction"
        )
