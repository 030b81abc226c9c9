"""`odc-mpi job`: print a batch script for Slurm or PBS that trains with a configuration, and optionally submit it."""

import argparse
import re
from typing import Any

from odc_mpi.cli.options import as_path, count, positive_int, require_config
from odc_mpi.errors import UserError
from odc_mpi.jobs.scripts import SIGNAL_S, PbsJob, SlurmJob, submit

HELP = "print a batch script for Slurm or PBS, or submit it"
#: Options that set the size of the job, each with its default and help text.
JOB = (
    ("--nodes", SlurmJob.nodes, "number of nodes"),
    ("--ranks-per-node", SlurmJob.ranks_per_node, "ranks of each node, usually its number of GPUs"),
    ("--cores-per-rank", SlurmJob.cores_per_rank, "cores of each rank"),
)
#: Options that are passed on to sbatch, because some sites require them, with their names in PBS.
CHOICES = {"partition": "-q", "account": "-A", "gpus-per-node": "ngpus"}
#: Options of Slurm alone.
SLURM_ONLY = ("stage", "stage-environment", "mpi", "spares")
#: Program of each scheduler that submits a script.
SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}
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
    parser.description = "Print a batch script that trains with CONFIG. With --submit, submit it, too."
    parser.add_argument("config", type=as_path, metavar="CONFIG", help="YAML file, at the same path on every node")
    parser.add_argument("--scheduler", choices=SUBMIT, default="slurm", help="default: slurm")
    for option, default, text in JOB:
        parser.add_argument(option, type=positive_int, default=default, metavar="N", help=f"{text}; default: {default}")
    limit = SlurmJob.time
    parser.add_argument("--time", default=limit, help=f"time limit, at least 5 minutes; default: {limit}")
    for name in CHOICES:
        parser.add_argument(f"--{name}", metavar="VALUE", help="option of sbatch or qsub; default: not set")
    parser.add_argument("--name", default=SlurmJob.name, help=f"name of the job; default: {SlurmJob.name}")
    parser.add_argument(
        "--stage", type=as_path, metavar="DIR", help="directory on each node; copy the data set there first"
    )
    parser.add_argument(
        "--stage-environment", type=as_path, metavar="TAR", help="unpack this virtual environment on each node first"
    )
    parser.add_argument("--spares", type=count, metavar="N", help="further nodes, to replace lost ones; default: 0")
    parser.add_argument("--mpi", metavar="TYPE", help="option of srun; default: that of the installed MPI library")
    parser.add_argument("--submit", action="store_true", help="submit the script with sbatch or qsub")


def run(arguments: argparse.Namespace) -> int:
    """Print the batch script and return 0. With `--submit`, also submit it, and return the exit code of sbatch."""
    # Imported late: other commands do not need it.
    from odc_mpi.training import settings as configuration

    require_config(arguments)
    config = configuration.load(arguments.config, arguments.overrides)
    seconds = _parse_time(arguments.time)
    script = _slurm_job(arguments, config.data.path) if arguments.scheduler == "slurm" else _pbs_job(arguments, seconds)
    print(script, end="", flush=True)
    return submit(script, SUBMIT[arguments.scheduler]) if arguments.submit else 0


def _slurm_job(arguments: argparse.Namespace, data: str) -> str:
    from odc_mpi.runtime.start.pmi import srun_mpi

    mpi = f"${{SLURM_MPI_TYPE:-{srun_mpi()}}}" if arguments.mpi is None else _check_word("mpi", arguments.mpi)
    return SlurmJob(
        f"{_headline(arguments)} The job saves before its time limit, requeues itself and resumes.",
        "sbatch FILE [--section.key value ...]",
        **_size(arguments),
        time=arguments.time,
        mpi=mpi,
        choices=_choices(arguments),
        stage=arguments.stage and str(arguments.stage),
        data=data if arguments.stage else None,
        spares=arguments.spares or 0,
        archive=arguments.stage_environment and str(arguments.stage_environment.absolute()),
    ).script()


def _pbs_job(arguments: argparse.Namespace, seconds: int) -> str:
    for name in SLURM_ONLY:
        if getattr(arguments, name.replace("-", "_")) is not None:
            raise UserError(f"--{name}: expected --scheduler slurm, got pbs: remove --{name}")
    if not seconds:
        raise UserError(f"--time: expected a time limit for PBS, got {arguments.time!r}")
    choices = {CHOICES[name]: value for name, value in _choices(arguments).items()}
    return PbsJob(
        f"{_headline(arguments)} The job saves before its time limit; another one resumes.",
        **_size(arguments),
        seconds=seconds,
        choices=choices,
    ).script()


def _headline(arguments: argparse.Namespace) -> str:
    file = "".join(letter if letter.isprintable() else "?" for letter in arguments.config.name)  # in a one-line comment
    return f"Trains {file}."


def _size(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that all kinds of jobs have."""
    sizes = {name: getattr(arguments, name) for name in ("nodes", "ranks_per_node", "cores_per_rank")}
    name = _check_word("name", arguments.name, r"[\w.-]+", "letters, digits, dots, dashes and underscores")
    # Symbolic links are not resolved: they may have other targets on the nodes.
    return {**sizes, "name": name, "arguments": ("--config", str(arguments.config.absolute()), *arguments.overrides)}


def _choices(arguments: argparse.Namespace) -> dict[str, str]:
    values = {name: getattr(arguments, name.replace("-", "_")) for name in CHOICES}
    return {name: _check_word(name, value) for name, value in values.items() if value is not None}


def _parse_time(time: str) -> int:
    """Return the time limit in seconds, or 0 if there is none. Raises `UserError` if sbatch would not accept it."""
    match = _TIME.fullmatch(time)
    if not match:
        raise UserError(f"--time: expected minutes, HH:MM:SS or DAYS-HH:MM:SS, got {time!r}")
    seconds = sum(int(number or 0) * unit for number, unit in zip(match.groups(), _UNITS_S, strict=True))
    if 0 < seconds < _SHORTEST_S:  # 0 means no limit
        raise UserError(
            f"--time: expected at least {_SHORTEST_S // 60} minutes, got {time!r}, {seconds / 60:g} minutes: a job is "
            f"signaled up to {SIGNAL_S // 60 + 1} minutes before its end"
        )
    return seconds


def _check_word(option: str, value: str, pattern: str = _WORD, expected: str = _WORD_DESCRIPTION) -> str:
    """Return `value` unchanged. Raises `UserError` unless it matches `pattern`. Matches need no quotes in scripts."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise UserError(f"--{option}: expected {expected}, got {value!r}")
    return value
