"""`odc-mpi run`: train, and start the ranks again when one is lost. Does not use MPI itself."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.cli import train
from odc_mpi.cli.options import Parser, count, positive_int
from odc_mpi.errors import UserError
from odc_mpi.runtime.start.launch import is_launched

if TYPE_CHECKING:
    from odc_mpi.supervisor.launchers import Host
    from odc_mpi.supervisor.supervisor import Commands

HELP = "train under mpiexec or srun, and restart from the newest checkpoint when a rank or a host is lost"
_EXAMPLE = "odc-mpi run --ranks 4 -- train --config FILE"
#: Default number of restarts at most.
_MAX_RESTARTS = 10


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line of `odc-mpi run` at `--`. Raises `UserError` if nothing follows."""
    options = list(argv[: argv.index("--")] if "--" in argv else argv)
    words = list(argv[len(options) + 1 :])
    if not words and not {"-h", "--help"} & set(options):
        raise UserError(f"expected -- and the training after the options, as in {_EXAMPLE}")
    return options, words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi run`."""
    parser.usage = "odc-mpi run [options] -- train [--config FILE] [--SECTION.KEY VALUE ...]"
    parser.description = (
        "Start the ranks with mpiexec or, in a Slurm job, with srun, and start them again from the newest checkpoint, "
        "on the hosts that are left, if they end without having finished. See docs/failures.md."
    )
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="ranks; default: those of all hosts, else 1")
    parser.add_argument(
        "--min-ranks", type=positive_int, default=1, metavar="N", help="end if fewer ranks are left; default: 1"
    )
    text = f"end after N restarts; default: {_MAX_RESTARTS}"
    parser.add_argument("--max-restarts", type=count, default=_MAX_RESTARTS, metavar="N", help=text)
    parser.add_argument(
        "--hosts", type=_names, metavar="H1:4,H2:4", help="hosts for mpiexec and their ranks; default: here"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the training to its end, and return its exit code."""
    from odc_mpi.supervisor.launchers import Host, Mpiexec, Srun, answering, is_slurm
    from odc_mpi.supervisor.supervisor import Supervisor

    if is_launched():
        raise UserError(f"odc-mpi run starts the ranks: run it without mpiexec, as in {_EXAMPLE}")
    run_dir, commands = _commands(arguments.training)
    hosts = _hosts(arguments.hosts, arguments.ranks) if arguments.hosts else [Host("", arguments.ranks or 1)]
    launcher = Srun() if is_slurm() and not arguments.hosts else Mpiexec(hosts)
    available = sum(host.ranks for host in launcher.hosts)
    ranks = arguments.ranks or available
    for name, least, most in (("ranks", ranks, available), ("min-ranks", arguments.min_ranks, ranks)):
        if least > most:
            raise UserError(f"--{name}: expected at most {most}, the number of available ranks, got {least}")
    if arguments.hosts and (lost := set(hosts) - set(answering(launcher, hosts))):
        names = ", ".join(sorted(host.name for host in lost))
        raise UserError(f"--hosts: expected hosts on which ssh runs `true` within 5 s, got no answer from {names}")
    return Supervisor(launcher, commands, run_dir, ranks, arguments.min_ranks, arguments.max_restarts).run()


def _commands(words: Sequence[str]) -> tuple[Path, "Commands"]:
    """Return the run directory, and the commands for ranks and hosts.

    Words before `train`, such as those of a container, replace this program.
    """
    from odc_mpi.supervisor.supervisor import Commands
    from odc_mpi.training import settings

    if "train" not in words:
        raise UserError(f"expected train after --, got {words[0]}: {_EXAMPLE}")
    place = words.index("train")
    parser = Parser(prog="odc-mpi train", add_help=False, allow_abbrev=False)
    train.add_arguments(parser)
    options, overrides = parser.parse_known_args(words[place + 1 :])
    if options.dry_run or options.ranks or options.help is not None:
        raise UserError("expected a training after --: use --dry-run, --ranks and --help without odc-mpi run")
    if options.config and options.config.exists() and not options.config.is_file():
        raise UserError(f"--config: expected a regular file, which each start reads, got {options.config}")
    config = settings.load(options.config, overrides)
    own = [sys.argv[0]] if Path(sys.argv[0]).name == "odc-mpi" else ["-m", "odc_mpi"]
    program = [*(words[:place] or [sys.executable, *own])]
    command = [*program, *words[place:]]
    # `never` is for the first start: before it has begun the run, there may be checkpoints of an earlier one.
    resumed = [*command, "--run.resume", "auto"] if config.run.resume == "never" else command
    rescue = (
        [*program, "checkpoint", "rescue", str(Path(config.run.dir).absolute())] if config.run.memory_every else None
    )
    return Path(config.run.dir), Commands(command, resumed, rescue)


def _hosts(hosts: Sequence["Host"], ranks: int | None) -> list["Host"]:
    """Return hosts with their numbers of ranks. Those without one share `ranks` equally."""
    missing = [host for host in hosts if not host.ranks]
    if missing and (len(missing) < len(hosts) or (ranks or 0) % len(hosts)):
        raise UserError(
            f"--hosts: expected the ranks of each host, as in {hosts[0].name}:4, or --ranks as a multiple of "
            f"{len(hosts)}, the number of hosts"
        )
    return [host._replace(ranks=host.ranks or (ranks or len(hosts)) // len(hosts)) for host in hosts]


def _names(text: str) -> list["Host"]:
    from odc_mpi.supervisor.launchers import Host

    hosts: list[Host] = []
    for word in text.split(","):
        name, colon, ranks = word.partition(":")
        if not name or name.startswith("-") or name in [host.name for host in hosts]:
            raise argparse.ArgumentTypeError(f"expected different hosts, as in h1,h2 or h1:4,h2:4, got {text!r}")
        hosts.append(Host(name, positive_int(ranks) if colon else 0))
    return hosts
