"""`odc-mpi prepare`: tokenize text and write it to a data set. Does not use MPI."""

import argparse
import dataclasses
import signal
import sys
from functools import partial
from pathlib import Path

from odc_mpi.cli.mpiexec import signals_handled
from odc_mpi.cli.options import output, positive_int

HELP = "tokenize JSONL, JSON, CSV or Parquet into an HDF5 data set"
_EPILOG = """\
Each line or row is an example in one of these formats; the first format whose fields are all present is used:
  chosen, rejected                pair of answers, texts or messages; prompt in prompt, conversations or instruction,
                                  or what both begin with; loss on the answers
  messages                        list of role and content; loss on assistant messages
  prompt, completion              two texts, or two lists of messages; loss on the completion
  conversations                   list of from and value; loss on assistant messages
  instruction, output (, input)   loss on output
  text                            loss on everything
Conversations may also have the fields tools (a list) and system. Lists may be JSON text, as in CSV. Messages with
"weight": 0 or "train": false have no loss. --columns prompt=question,completion=answer reads fields with other names.

Weights, such as a.jsonl:0.7 b.parquet:0.3, are the shares of the sources in the data set. Examples are sampled with
--seed; --stopping-strategy decides whether one may be used twice. Without weights, all examples are used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi prepare`."""
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
    parser.add_argument("--force", action="store_true", help="replace a data set that was made from other sources")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|NAME|DATA.h5",
        help="directory, name on the hub, or data set; default: train a tokenizer",
    )
    parser.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="Jinja template that replaces that of the tokenizer"
    )
    parser.add_argument(
        "--split-turns",
        choices=("auto", "always", "never"),
        default="auto",
        help="write one sequence for each answer of a conversation; auto: if the chat template changes earlier answers",
    )
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest sequence; default: no limit")
    parser.add_argument(
        "--overlong",
        choices=("truncate", "drop", "split"),
        default="truncate",
        help="treatment of longer sequences; split: plain text only, into consecutive sequences",
    )
    parser.add_argument("--bad-lines", choices=("error", "skip"), default="error", help="treatment of invalid lines")
    parser.add_argument(
        "--eval-fraction", type=float, default=0.0, metavar="F", help="fraction to hold out in NAME.eval.h5, e.g. 0.02"
    )
    parser.add_argument(
        "--columns", type=_columns, default={}, metavar="FIELD=NAME,...", help="names of the fields in SOURCE"
    )
    parser.add_argument(
        "--split", metavar="NAME", help="split of a Hugging Face data set; default: train, or its only split"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="vocabulary size of a trained tokenizer")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling from sources with weights")
    parser.add_argument(
        "--stopping-strategy",
        choices=("first_exhausted", "all_exhausted"),
        default="first_exhausted",
        help="end of a weighted mixture: before an example is used twice, or when each has been used",
    )
    parser.add_argument(
        "--show", type=positive_int, metavar="N", help="print the first N sequences, with the loss tokens marked"
    )
    parser.add_argument(
        "--num-proc", type=positive_int, metavar="N", help="processes; default: the available cores, 1 for little text"
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
    # SIGTERM raises SystemExit, so that temporary files are removed.
    with signals_handled(lambda *_: sys.exit(128 + signal.SIGTERM), signal.SIGTERM):
        report = prepare(arguments.sources, arguments.out, PrepareOptions(**options), Console(stderr=True))
    print(report.describe(), flush=True)
    if arguments.show:
        show_sequences(report.path, range(arguments.show), Console())
    return 0
