"""`odc-mpi checkpoint`: list, verify and inspect checkpoints, in a single process, or rescue them from memory."""

import argparse
from pathlib import Path

from odc_mpi.cli.model.export import DIRECTORY_HELP
from odc_mpi.cli.options import as_path
from odc_mpi.errors import UserError

HELP = "list, verify and inspect checkpoints"

_ACTIONS = {
    "list": "list the checkpoints of a run",
    "verify": "compare all data with its checksums; exit code 1 if a checkpoint is damaged",
    "show": "print the tensors of the newest checkpoint, with shapes, types and norms",
    "digest": "print one SHA-256 over the tensors of the newest checkpoint, independent of the number of ranks",
    "index": "write index.h5 of the newest checkpoint; checkpoints of more than 64 ranks are saved without it",
}
#: Exit code of `rescue` if the newest checkpoint on disk is used.
NOT_RESCUED = 3
_RESCUE_HELP = (
    "after a rank has died, on each remaining host: make a checkpoint from the newest state in memory "
    "(run.memory_every); exit code 3 if there is none that is complete and newer than those on disk"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per action, each with its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, help_text in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        action.add_argument("directory", metavar="DIR", type=as_path, help=DIRECTORY_HELP)
    rescue = actions.add_parser("rescue", help=_RESCUE_HELP, description=_RESCUE_HELP, allow_abbrev=False)
    rescue.add_argument("directory", metavar="RUN_DIR", type=as_path, help="run.dir of the run")
    rescue.add_argument("--memory-dir", metavar="DIR", help="default: run.memory_dir of the run")


def run(arguments: argparse.Namespace) -> int:
    """Run the selected action and return the exit code.

    It is 1 if `verify` finds a damaged checkpoint, and `NOT_RESCUED` if `rescue` makes none.
    """
    from odc_mpi.checkpoint import commands

    if arguments.action == "rescue":
        return rescue_run(arguments.directory, arguments.memory_dir)
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


def rescue_run(run_dir: Path, memory_dir: str | None = None) -> int:
    """Make a checkpoint from the newest state in memory, and print a line. Return 0, or `NOT_RESCUED` if there is none.

    Call this on each remaining host when all processes of the run have ended. `memory_dir` is by default that of the
    run's configuration. Raises `UserError` if there is no such run, or if it is alive on this host.
    """
    from odc_mpi.checkpoint.memory import expand
    from odc_mpi.checkpoint.rescue import rescue
    from odc_mpi.training.rundir.run_dir_lock import wait_until_free
    from odc_mpi.training.settings import load

    path = run_dir / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run_dir}: expected the run.dir of a run, got no {path.name} in it")
    wait_until_free(run_dir)
    rescued = rescue(run_dir, expand(memory_dir or load(path).run.memory_dir))
    print(rescued.message)
    return NOT_RESCUED if rescued.step is None else 0
