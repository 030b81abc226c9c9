"""`odc-mpi job`: print a Slurm batch script that trains with a configuration, and optionally submit it."""

import argparse
import re

from odc_mpi.cli.options import as_path, positive_int, require_config
from odc_mpi.errors import UserError
from odc_mpi.slurm.job import SIGNAL_S, SlurmJob, submit

HELP = "print a Slurm batch script for a configuration, or submit it"
#: Options that set the size of the job, each with its default and help text.
JOB = (
    ("--nodes", SlurmJob.nodes, "number of nodes"),
    ("--ranks-per-node", SlurmJob.ranks_per_node, "ranks of each node, usually its number of GPUs"),
    ("--cores-per-rank", SlurmJob.cores_per_rank, "cores of each rank"),
)
#: Options that are passed on to sbatch, because some sites require them.
CHOICES = ("partition", "account", "gpus-per-node")
#: Pattern for the formats in which sbatch accepts time limits: M, M:S, H:M:S, D-H, D-H:M and D-H:M:S.
_TIME = re.compile(r"(\d+)(?::(\d+))?|(\d+):(\d+):(\d+)|(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?")
_UNITS_S = (60, 1, 3600, 60, 1, 86400, 3600, 60, 1)
#: Pattern for option values of sbatch and srun, and its description in error messages.
_WORD, _WORD_DESCRIPTION = r"[\w.,:/@+=-]+", "a word of letters, digits and . , : / @ + = - _"
#: Minimum time limit in seconds. A shorter job would receive the stop signal while it is still starting.
_SHORTEST_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi job`."""
    parser.usage = "odc-mpi job CONFIG [options] [--SECTION.KEY VALUE ...]"
    parser.description = "Print a Slurm batch script that trains with CONFIG. With --submit, submit it, too."
    parser.add_argument("config", type=as_path, metavar="CONFIG", help="YAML file, at the same path on every node")
    for option, default, text in JOB:
        parser.add_argument(option, type=positive_int, default=default, metavar="N", help=f"{text}; default: {default}")
    limit = SlurmJob.time
    parser.add_argument("--time", default=limit, help=f"time limit, at least 5 minutes; default: {limit}")
    for name in CHOICES:
        parser.add_argument(f"--{name}", metavar="VALUE", help="option of sbatch; default: not set")
    parser.add_argument("--name", default=SlurmJob.name, help=f"name of the job; default: {SlurmJob.name}")
    parser.add_argument(
        "--stage", type=as_path, metavar="DIR", help="directory on each node; copy the data set there first"
    )
    parser.add_argument("--mpi", metavar="TYPE", help="option of srun; default: that of the installed MPI library")
    parser.add_argument("--submit", action="store_true", help="submit the script with sbatch")


def run(arguments: argparse.Namespace) -> int:
    """Print the batch script and return 0. With `--submit`, also submit it, and return the exit code of sbatch."""
    # Imported late: other commands need neither module.
    from odc_mpi.runtime.start.pmi import srun_mpi
    from odc_mpi.training import settings as configuration

    require_config(arguments)
    config = configuration.load(arguments.config, arguments.overrides)
    mpi = f"${{SLURM_MPI_TYPE:-{srun_mpi()}}}" if arguments.mpi is None else _check_word("mpi", arguments.mpi)
    choices = {name: getattr(arguments, name.replace("-", "_")) for name in CHOICES}
    file = "".join(letter if letter.isprintable() else "?" for letter in arguments.config.name)  # in a one-line comment
    script = SlurmJob(
        f"Trains {file}. The job saves before its time limit, requeues itself and resumes.",
        "sbatch FILE [--section.key value ...]",
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        cores_per_rank=arguments.cores_per_rank,
        time=_check_time(arguments.time),
        mpi=mpi,
        name=_check_word("name", arguments.name, r"[\w.-]+", "letters, digits, dots, dashes and underscores"),
        choices={name: _check_word(name, value) for name, value in choices.items() if value is not None},
        # Symbolic links are not resolved: they may have other targets on the nodes.
        arguments=("--config", str(arguments.config.absolute()), *arguments.overrides),
        stage=arguments.stage and str(arguments.stage),
        data=config.data.path if arguments.stage else None,
    ).script()
    print(script, end="", flush=True)
    return submit(script) if arguments.submit else 0


def _check_time(time: str) -> str:
    match = _TIME.fullmatch(time)
    if not match:
        raise UserError(f"--time: expected minutes, HH:MM:SS or DAYS-HH:MM:SS, got {time!r}")
    seconds = sum(int(number or 0) * unit for number, unit in zip(match.groups(), _UNITS_S, strict=True))
    if 0 < seconds < _SHORTEST_S:  # 0 means no limit
        raise UserError(
            f"--time: expected at least {_SHORTEST_S // 60} minutes, got {time!r}, {seconds / 60:g} minutes: Slurm "
            f"signals a job up to {SIGNAL_S // 60 + 1} minutes before its end"
        )
    return time


def _check_word(option: str, value: str, pattern: str = _WORD, expected: str = _WORD_DESCRIPTION) -> str:
    """Return `value` unchanged. Raises `UserError` unless it matches `pattern`. Matches need no quotes in scripts."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise UserError(f"--{option}: expected {expected}, got {value!r}")
    return value
