"""`odc-mpi prepare`: its options and its run. One process."""

import argparse
from pathlib import Path

HELP = "turn text into tokens on disk"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Local."""
    parser.description = "Write a data set of token sequences, with a mask of what is trained."
    parser.add_argument("source", metavar="SOURCE", help="a JSONL file (.gz too), or stdlib: Python's own functions")
    parser.add_argument("out", metavar="OUT.h5", type=Path, help="the data set to write")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="Hugging Face tokenizer directory, or a data set; default: one is trained on SOURCE",
    )
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest sequence; default: no limit")
    parser.add_argument(
        "--overlong", choices=("truncate", "drop"), default="truncate", help="what to do with longer ones"
    )
    parser.add_argument(
        "--bad-lines",
        choices=("error", "skip"),
        default="error",
        help="what to do with JSONL lines that cannot be used",
    )
    parser.add_argument(
        "--eval-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="hold out about so much, such as 0.02, in OUT.eval.h5; for data.eval_path",
    )
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="JSONL field of the prompt")
    parser.add_argument(
        "--completion-field", default="completion", metavar="NAME", help="JSONL field of the completion"
    )
    parser.add_argument("--vocab-size", type=int, default=4096, help="of a tokenizer that is trained")


def run(arguments: argparse.Namespace) -> int:
    """Prepare a data set, and return the exit code. Local.

    Raises:
        UserError: The source or an option is wrong, or something cannot be written.
    """
    from rich.console import Console

    from odc_mpi.data.prepare import prepare

    console = Console(stderr=True)
    report = prepare(
        arguments.source,
        arguments.out,
        tokenizer=arguments.tokenizer,
        max_length=arguments.max_length,
        overlong=arguments.overlong,
        prompt_field=arguments.prompt_field,
        completion_field=arguments.completion_field,
        vocab_size=arguments.vocab_size,
        bad_lines=arguments.bad_lines,
        eval_fraction=arguments.eval_fraction,
        console=console,
    )
    print(report.describe())
    return 0
