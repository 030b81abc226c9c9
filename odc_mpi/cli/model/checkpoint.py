"""`odc-mpi checkpoint`: list, verify and inspect checkpoints, in a single process."""

import argparse

from odc_mpi.cli.model.export import DIRECTORY_HELP
from odc_mpi.cli.options import as_path

HELP = "list, verify and inspect checkpoints"

_ACTIONS = {
    "list": "list the checkpoints of a run",
    "verify": "compare all data with its checksums; exit code 1 if a checkpoint is damaged",
    "show": "print the tensors of the newest checkpoint, with shapes, types and norms",
    "digest": "print one SHA-256 over the tensors of the newest checkpoint, independent of the number of ranks",
    "index": "write index.h5 of the newest checkpoint; checkpoints of more than 64 ranks are saved without it",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per action, each with its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, help_text in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        action.add_argument("directory", metavar="DIR", type=as_path, help=DIRECTORY_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Run the selected action and return the exit code, which is 1 if `verify` finds a damaged checkpoint."""
    from odc_mpi.checkpoint import commands

    if arguments.action == "verify":
        lines, num_damaged = commands.verify(arguments.directory)
        print("\n".join(lines))
        return 1 if num_damaged else 0
    if arguments.action in ("digest", "index"):
        print((commands.digest_line if arguments.action == "digest" else commands.index_line)(arguments.directory))
        return 0
    for line in (commands.list_lines if arguments.action == "list" else commands.show_lines)(arguments.directory):
        print(line)
    return 0
