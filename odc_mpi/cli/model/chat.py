"""`odc-mpi chat`: chat with a model in the terminal. Runs in a single process."""

import argparse

from odc_mpi.cli.model import generate
from odc_mpi.cli.options import utf8

HELP = "talk to a run, a checkpoint or a Hugging Face model on the terminal"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi chat`."""
    parser.description = "Read questions line by line and answer them, until the end of the input (Ctrl-D)."
    generate.add_model(parser, max_new_tokens=512)
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="system message at the start of the conversation")
    parser.set_defaults(timeout_s=3600)


def run(arguments: argparse.Namespace) -> int:
    """Answer questions from standard input until the end of the input, and return the exit code."""
    return generate.start(arguments, lambda module, job, world: module.chat(job, world, arguments.system))
