"""`odc-mpi prepare`: tokenize text and write it to a data set. Does not use MPI."""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from odc_mpi.cli.options import as_path, output, positive_int

HELP = "tokenize JSONL, JSON, CSV or Parquet into an HDF5 data set"
_EPILOG = """\
Each line or row is an example in one of these formats; the first format whose fields are all present is used:
  chosen, rejected                pair of answers, texts or messages; prompt in prompt, conversations or instruction,
                                  or what both begin with; loss on the answers
  messages                        list of role and content; loss on assistant messages
  prompt, completion (, label)    two texts, or two lists of messages; loss on the completion; label true or false makes
                                  it a desirable or an undesirable answer, for run.objective kto
  conversations                   list of from and value; loss on assistant messages
  instruction, output (, input)   loss on output
  text                            loss on everything
Conversations and prompts with completions may also have the fields tools (a list), system and history. Lists may be
JSON text, as in CSV. Messages with "weight": 0 or "train": false have no loss. The report counts lines with fields that
are not used. --columns prompt=question,completion=answer reads fields with other names.

Weights, such as a.jsonl:0.7 b.parquet:0.3, are the shares of the sources in the data set. Examples are sampled with
--seed; --stopping-strategy decides whether one may be used twice. Without weights, all examples are used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi prepare`, most of which are the fields of `PrepareOptions`."""
    from odc_mpi.data.prepare import PrepareOptions

    hints = get_type_hints(PrepareOptions, include_extras=True)
    parser.description = "Write an HDF5 data set of token sequences with a loss mask."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="JSONL, JSON array, CSV, TSV (also .gz and .zst) or Parquet file, a folder of such files, a directory of "
        "save_to_disk, OWNER/NAME[/CONFIGURATION] on the Hugging Face Hub, or stdlib, the functions of Python's "
        "standard library; with a weight: SOURCE:WEIGHT",
    )
    parser.add_argument("--out", type=output, required=True, metavar="FILE", help="data set to write, such as chats.h5")
    for item in dataclasses.fields(PrepareOptions):
        kind, help_text, *metavar = get_args(hints[item.name])
        option = f"--{item.name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(option, action="store_true", help=help_text)
        elif get_origin(kind) is Literal:
            parser.add_argument(option, choices=get_args(kind), default=item.default, help=help_text)
        else:
            convert, default = (get_args(kind) or [kind])[0], item.default
            convert = as_path if convert is Path else convert
            if item.name == "columns":
                convert, default = _columns, {}
            parser.add_argument(option, type=convert, default=default, metavar=metavar[0], help=help_text)
    parser.add_argument(
        "--show", type=positive_int, metavar="N", help="print the first N sequences, with the loss tokens marked"
    )


def _columns(text: str) -> dict[str, str]:
    """Parse pairs such as ``prompt=question,completion=answer`` into a dictionary that maps fields to columns."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    return {name.strip(): source.strip() for name, _, source in pairs}


def run(arguments: argparse.Namespace) -> int:
    """Write a data set, print a summary and any sequences requested with `--show`, and return the exit code."""
    from rich.console import Console

    from odc_mpi.data.prepare import PrepareOptions, prepare
    from odc_mpi.data.show import show_sequences

    if arguments.tokenizer is not None:
        from odc_mpi.hub import resolve_model_path

        report_line = partial(print, file=sys.stderr, flush=True)
        name = resolve_model_path(str(arguments.tokenizer), "--tokenizer", weights=False, report=report_line)
        arguments.tokenizer = Path(name)
    options = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(PrepareOptions)}
    report = prepare(arguments.sources, arguments.out, PrepareOptions(**options), Console(stderr=True))
    print(report.describe(), flush=True)
    if arguments.show:
        show_sequences(report.path, range(arguments.show), Console())
    return 0
