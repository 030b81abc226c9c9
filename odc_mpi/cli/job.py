"""`odc-mpi job`: its options and its run."""

import argparse
import re
from pathlib import Path

from odc_mpi.cli.options import positive_int
from odc_mpi.errors import UserError
from odc_mpi.slurm import job

HELP = "a batch script for Slurm from a configuration"
#: How large a job is.
JOB = (
    ("--nodes", job.SlurmJob.nodes, "how many"),
    ("--ranks-per-node", job.SlurmJob.ranks_per_node, "ranks of each, as many as it has GPUs, say"),
    ("--cores-per-rank", job.SlurmJob.cores_per_rank, "cores of each rank"),
)
#: Options that are sbatch's own, for sites that ask for them.
CHOICES = ("partition", "account", "gpus-per-node")
#: Minutes, with seconds or after hours; or hours after days, with minutes and seconds.
_TIME = re.compile(r"(\d+)(?::(\d+))?|(\d+):(\d+):(\d+)|(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?")
_UNITS_S = (60, 1, 3600, 60, 1, 86400, 3600, 60, 1)
#: Values of sbatch's and srun's.
_WORD, _WORD_IN_WORDS = r"[\w.,:/@+=-]+", "a word of letters, digits and . , : / @ + = - _"
#: A shorter job would be told to stop while it starts.
_SHORTEST_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.usage = "odc-mpi job CONFIG [options] [--SECTION.KEY VALUE ...]"
    parser.description = "Print the batch script that trains a configuration, and submit it on request."
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file that every node finds under this name")
    for option, default, help_text in JOB:
        parser.add_argument(
            option, type=positive_int, default=default, metavar="N", help=f"{help_text}; default: {default}"
        )
    limit = job.SlurmJob.time
    parser.add_argument("--time", default=limit, help=f"limit, as sbatch takes it, 5 minutes or more; default: {limit}")
    for name in CHOICES:
        parser.add_argument(f"--{name}", metavar="VALUE", help="of sbatch; default: none")
    parser.add_argument("--name", default=job.SlurmJob.name, help=f"of the job; default: {job.SlurmJob.name}")
    parser.add_argument("--stage", metavar="DIR", help="of each node: copy the data set there first")
    parser.add_argument("--mpi", metavar="TYPE", help="of srun; default: what this environment's MPI library needs")
    parser.add_argument("--submit", action="store_true", help="hand it to sbatch, too")


def run(arguments: argparse.Namespace) -> int:
    """Print the script, and submit it if that is asked.

    Returns:
        The exit code: sbatch's, if it was asked.

    Raises:
        UserError: The configuration is wrong, or there is no sbatch.
    """
    # Not before here: other commands need neither.
    from odc_mpi.runtime.start.pmi import srun_mpi
    from odc_mpi.training import settings as configuration

    if not arguments.config.exists():
        raise UserError(
            f"{arguments.config}: expected a configuration file, got none of this name: CONFIG comes first, as in "
            "odc-mpi job CONFIG --run.steps 5"
        )
    config = configuration.load(arguments.config, arguments.overrides)
    choices = {name: getattr(arguments, name.replace("-", "_")) for name in CHOICES}
    requested = job.SlurmJob(
        nodes=arguments.nodes,
        ranks_per_node=arguments.ranks_per_node,
        cores_per_rank=arguments.cores_per_rank,
        time=_check_time(arguments.time),
        mpi=_check_word("mpi", arguments.mpi) if arguments.mpi is not None else job.unless_set(srun_mpi()),
        name=_check_word("name", arguments.name, r"[\w.-]+", "letters, digits, dots, dashes and underscores"),
        choices=tuple((name, _check_word(name, value)) for name, value in choices.items() if value is not None),
        stage=arguments.stage,
    )
    script = job.script_for_config(requested, arguments.config, tuple(arguments.overrides), config.data.path)
    print(script, end="", flush=True)
    return job.submit(script) if arguments.submit else 0


def _check_time(time: str) -> str:
    """Return a time limit that sbatch understands, and that leaves time to train."""
    found = _TIME.fullmatch(time)
    if not found:
        raise UserError(f"--time: expected minutes, HH:MM:SS or DAYS-HH:MM:SS, got {time!r}")
    seconds = sum(int(number or 0) * unit for number, unit in zip(found.groups(), _UNITS_S, strict=True))
    if 0 < seconds < _SHORTEST_S:  # 0 is no limit
        raise UserError(
            f"--time: expected at least {_SHORTEST_S // 60} minutes, as a job is told to stop up to "
            f"{job.SIGNAL_S // 60 + 1} before its end, got {time!r}, {seconds / 60:g} minutes"
        )
    return time


def _check_word(option: str, value: str, pattern: str = _WORD, expected: str = _WORD_IN_WORDS) -> str:
    """Return a value that may stand in a script without quotes; the job's name also in file names."""
    if not re.fullmatch(pattern, value, re.ASCII):
        raise UserError(f"--{option}: expected {expected}, got {value!r}")
    return value
