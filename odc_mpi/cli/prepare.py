"""`odc-mpi prepare`: its options and its run. No MPI."""

import argparse
import dataclasses
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from odc_mpi.cli.options import positive_int
from odc_mpi.errors import UserError

HELP = "turn text into tokens on disk"
_EPILOG = """\
An example is a line or a row with the fields of one of these forms, the first that fits:
  messages                        role and content of each, of which the assistant's are learnt
  prompt, completion              two texts, or two lists of messages; the completion is learnt
  conversations                   from and value of each
  instruction, output (, input)   the output is learnt
  text                            all of it is learnt
Conversations take tools (a list, or JSON text of one) and system from the fields of these names.

Weights, such as a.jsonl:0.7 b.parquet:0.3, are shares of the examples that are taken, in proportion; each example is
taken at most once unless --stopping-strategy says otherwise, and --seed draws which. Without weights all are taken.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Write a data set of token sequences, with a mask of what is trained."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="a file of JSON lines (.gz and .zst too) or Parquet, a folder of such files, or stdlib: Python's own "
        "functions; with a weight: SOURCE:WEIGHT",
    )
    parser.add_argument("out", metavar="OUT.h5", type=Path, help="the data set to write")
    parser.add_argument("--prompts-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|DATA.h5",
        help="Hugging Face tokenizer directory, or a data set; default: one is trained on the sources",
    )
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest sequence; default: no limit")
    parser.add_argument(
        "--overlong", choices=("truncate", "drop"), default="truncate", help="what to do with longer ones"
    )
    parser.add_argument(
        "--bad-lines",
        choices=("error", "skip"),
        default="error",
        help="what to do with lines and rows that cannot be used",
    )
    parser.add_argument(
        "--eval-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="hold out about so much, such as 0.02, in OUT.eval.h5; for data.eval_path",
    )
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="field of the prompt")
    parser.add_argument("--completion-field", default="completion", metavar="NAME", help="field of the completion")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer that is trained")
    parser.add_argument("--seed", type=int, default=0, help="draws which examples of sources with weights are taken")
    parser.add_argument(
        "--stopping-strategy",
        choices=("first_exhausted", "all_exhausted"),
        default="first_exhausted",
        help="where a mixture by weights ends: before an example would be taken twice, or when each was taken",
    )
    parser.add_argument(
        "--num-proc",
        type=positive_int,
        metavar="N",
        help="processes that tokenise; default: the cores that this process may use, or one where there is little text",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare a data set, and return the exit code.

    Raises:
        UserError: The source or an option is wrong, or something cannot be written.
    """
    if arguments.prompts_only:
        raise UserError(
            "--prompts-only: training with run.objective grpo reads prompts directly: set data.path to the file of "
            "prompts, and rl.tokenizer if model.path has no tokenizer"
        )
    from rich.console import Console

    from odc_mpi.data.prepare import PrepareOptions, prepare

    chosen = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(PrepareOptions)}
    with _tidy_at_sigterm():
        report = prepare(arguments.sources, arguments.out, PrepareOptions(**chosen), Console(stderr=True))
    print(report.describe())
    return 0


@contextmanager
def _tidy_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the enclosed code as an exception does, by which temporary files go."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
