"""Batch scripts for Slurm: of a training configuration, and the templates in jobs/, which are the same.

Nothing here starts MPI. The scripts are plain bash, to be read and changed: what a site has to choose stands at their
beginning. They rest on this: the batch script alone gets a signal before the time is up and passes it to the ranks,
which save and end; they leave a note that tells this from an end at the last step, and the job puts itself back into
the queue.
"""

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from odc_mpi.errors import UserError

_HEAD = """\
#!/bin/bash
# {headline}
#
#     {usage}
#
# What stands in a line #SBATCH may be given to sbatch instead, as in sbatch --nodes=4 ...
#
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks}       # ranks: one per GPU, or one per group of cores
#SBATCH --cpus-per-task={cores}         # cores of a rank
#SBATCH --time={time}
"""
_RESTART = """\
#SBATCH --signal=B:USR1@{signal_s}     # seconds before the end: enough for one step and a checkpoint
#SBATCH --requeue
#SBATCH --open-mode=append        # one log for all starts
"""
_SITE = """\
#SBATCH --output={output}
{choices}
# The same for your site: modules, an environment in which odc-mpi is found on every node, a container.
#   module load ...
#   . venv/bin/activate
#   container=(apptainer exec --nv IMAGE)
container=()
# By what the ranks find each other: pmix for Open MPI, pmi2 for MPICH. srun --mpi=list shows what this Slurm has.
export SLURM_MPI_TYPE=${{SLURM_MPI_TYPE:-{mpi}}}
"""
_STAGING = """\
# STAGE=DIR DATA=FILE: read this data set from a directory that each node has of its own, such as /tmp. Empty: no copy.
stage={stage}
data={data}
"""
_ARGUMENTS = """\

set -- {arguments} "$@"
"""
_SWEEP = """\

# One line of settings for each number in --array above.
settings=(
    "--optim.learning_rate 1e-5"
    "--optim.learning_rate 3e-5"
    "--optim.learning_rate 1e-4"
)
read -ra own <<< "${settings[SLURM_ARRAY_TASK_ID]}"
set -- "$@" "${own[@]}" --run.dir "runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID"
"""
_STAGE = """\

if [ -n "$stage" ]; then
    local_data=$stage/$SLURM_JOB_ID-${data##*/}
    sbcast --force "$data" "$local_data" || exit 1
    set -- "$@" --data.path "$local_data"
fi
"""
#: Every task may use all GPUs of its node: with one each, tasks could not open each other's memory.
_BINDING = """\
binding=(--distribution=block --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores --mem-bind=local)
binding+=(--gpu-bind=none)        # every rank reads the memory of all GPUs of its node
"""
_TRAIN = """\

# srun ends all ranks when one ends badly; so those that stop as asked end well, and leave this file.
export ODC_MPI_STOPPED_FILE=$PWD/.odc-mpi-$SLURM_JOB_ID.stopped
rm -f "$ODC_MPI_STOPPED_FILE"
srun --kill-on-bad-exit=1 "${binding[@]}" "${container[@]}" odc-mpi train "$@" &
step=$!
# Once: told twice, the ranks would not wait for the end of their step.
trap 'trap "" USR1; kill -USR1 "$step"' USR1
wait "$step"
code=$?
if [ "$code" -eq 138 ]; then      # 128 + 10: it was the wait that the signal ended
    wait "$step"
    code=$?
fi
"""
_UNSTAGE = """\
if [ -n "$stage" ]; then
    srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none rm -f "$local_data"
fi
"""
_END = """\
if [ -e "$ODC_MPI_STOPPED_FILE" ]; then
    rm -f "$ODC_MPI_STOPPED_FILE"
    scontrol requeue "$SLURM_JOB_ID"
    exit 75                       # taken for the job's only if the requeue fails
fi
exit "$code"
"""
_COMMAND = """\

srun --kill-on-bad-exit=1 "${{binding[@]}}" "${{container[@]}}" {command}
"""
#: Options of sbatch that a site may ask for; those that are not given stay comments.
_CHOICES = {
    "partition": "PARTITION",
    "account": "ACCOUNT",
    "gpus-per-node": "8",
    "mem": "0                 # all memory of each node",
    "exclusive": "",
}
_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}|\d+(-\d{1,2})?")


@dataclass(frozen=True)
class Job:
    """What a batch script asks Slurm for, and what it runs.

    Attributes:
        nodes: How many.
        ranks_per_node: Tasks of each.
        cores_per_rank: Cores of a task.
        time: Limit, as sbatch takes it.
        mpi: What srun --mpi is, unless SLURM_MPI_TYPE says otherwise.
        name: Of the job.
        choices: Options of sbatch by name, of those a site may ask for.
        arguments: Of odc-mpi train; more may be given to the script.
        stage: Directory of each node to copy the data set to; None reads it where it is.
        data: The data set, for that.
    """

    nodes: int = 1
    ranks_per_node: int = 8
    cores_per_rank: int = 8
    time: str = "04:00:00"
    mpi: str = "pmix"
    name: str = "odc-mpi"
    choices: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    stage: str | None = None
    data: str | None = None


def training(job: Job, headline: str, usage: str, *, array: str | None = None) -> str:
    """Return the batch script of a training. Local.

    Args:
        job: What it asks for.
        headline: What it is, for its first line.
        usage: How to submit it.
        array: The numbers of an array of jobs, with an example of what differs between them.
    """
    staging = {
        "stage": shlex.quote(job.stage) if job.stage else "${STAGE:-}",
        "data": shlex.quote(job.data) if job.data else "${DATA:-}",
    }
    parts = [
        _head(job, headline, usage),
        *([f"#SBATCH --array={array}\n"] if array else []),
        _RESTART.format(signal_s=120),
        _site(job, "%x-%A_%a.out" if array else "%x-%j.out"),
        _STAGING.format(**staging),
        *([_ARGUMENTS.format(arguments=shlex.join(job.arguments))] if job.arguments else []),
        *([_SWEEP] if array else []),
        *(_STAGE, "\n", _BINDING, _TRAIN, _UNSTAGE, _END),
    ]
    return "".join(parts)


def command(job: Job, headline: str, usage: str, words: str) -> str:
    """Return the batch script of a command that ends by itself. Local; arguments as for `training`."""
    parts = [_head(job, headline, usage), _site(job, "%x-%j.out"), "\n", _BINDING, _COMMAND.format(command=words)]
    return "".join(parts)


def templates() -> dict[str, str]:
    """Return the files of jobs/ by name. Local."""

    def usage(name: str) -> str:
        return f"sbatch jobs/{name}.sbatch --config CONFIG [--section.key value ...]"

    few = Job(nodes=2, ranks_per_node=2, time="00:30:00")
    return {
        "single_node": training(
            Job(),
            "Training on one node: it saves before its time is up, queues again and goes on by itself.",
            usage("single_node"),
        ),
        "multi_node": training(
            Job(nodes=2),
            "Training on several nodes: it saves before its time is up, queues again and goes on by itself.",
            usage("multi_node"),
        ),
        "sweep": training(
            Job(name="sweep"),
            "Trainings that differ in some settings, as an array of jobs, each of which saves and goes on by itself.",
            usage("sweep"),
            array="0-2%2             # so many, two at a time",
        ),
        "doctor": command(
            replace(few, name="doctor"),
            "What MPI really does between the ranks of a node and between nodes: to run before any training.",
            "sbatch jobs/doctor.sbatch [--json]",
            'odc-mpi doctor "$@"',
        ),
        "bench": command(
            replace(few, name="bench"),
            "What fetches and pushes achieve between these nodes, in GB/s, beside MPI's own collectives.",
            "sbatch jobs/bench.sbatch [transport --sizes 64K,1M,16M ... | train --config CONFIG ...]",
            'odc-mpi bench "${@:-transport}"',
        ),
    }


def submit(script: str) -> int:
    """Hand a batch script to sbatch, whose words and exit code become this program's. Local.

    Raises:
        UserError: There is no sbatch.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("--submit: no sbatch on the PATH: run this where jobs are submitted, or leave --submit out")
    return subprocess.run([sbatch], input=script, text=True, check=False).returncode


def check_time(time: str) -> str:
    """Return a time limit that sbatch understands. Local.

    Raises:
        UserError: It does not look like one.
    """
    if not _TIME.fullmatch(time):
        raise UserError(f"--time: expected minutes, HH:MM:SS or DAYS-HH:MM:SS, got {time!r}")
    return time


def check_name(name: str) -> str:
    """Return a name that may stand in a script and in file names. Local.

    Raises:
        UserError: It may not.
    """
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise UserError(f"--name: expected letters, digits, dots, dashes and underscores, got {name!r}")
    return name


def for_config(job: Job, config: Path, overrides: tuple[str, ...], data: str) -> str:
    """Return the script that trains a configuration. Local.

    Args:
        job: What it asks for; what it runs is set here.
        config: The file, to be found under the same name on every node.
        overrides: Further arguments of odc-mpi train.
        data: The data set that the configuration names, for staging.
    """
    arguments = ("--config", str(config.resolve()), *overrides)
    job = replace(job, arguments=arguments, data=data if job.stage else None)
    headline = f"Training of {config.name}: it saves before its time is up, queues again and goes on by itself."
    return training(job, headline, "sbatch FILE [--section.key value ...]")


def _head(job: Job, headline: str, usage: str) -> str:
    return _HEAD.format(
        headline=headline,
        usage=usage,
        name=job.name,
        nodes=job.nodes,
        ranks=job.ranks_per_node,
        cores=job.cores_per_rank,
        time=job.time,
    )


def _site(job: Job, output: str) -> str:
    chosen = dict(job.choices)
    lines = [f"#SBATCH --{name}={chosen[name]}" for name in _CHOICES if name in chosen]
    left = [(name, example) for name, example in _CHOICES.items() if name not in chosen]
    if left:
        lines.append("# To choose for your site, with one # less:")
        lines += [f"##SBATCH --{name}{'=' if example else ''}{example}" for name, example in left]
    return _SITE.format(output=output, choices="\n".join(lines), mpi=job.mpi)
