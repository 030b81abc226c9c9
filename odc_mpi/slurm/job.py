"""Batch scripts for Slurm, for a training configuration; jobs/batch_scripts.py makes templates of the same parts.

Nothing here starts MPI. The scripts are plain bash, to be read and changed: the choices of a site stand at the top.
Before the time is up Slurm sends a signal to the batch script alone, which passes it on to the running command. The
ranks save and end, and leave a file that tells a stop from an end at the last step. Then the job queues itself again.
"""

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
export SLURM_MPI_TYPE={mpi}
"""
_STAGING = """\
# STAGE=DIR DATA=FILE: read this data set from a directory that each node has of its own, such as /tmp. Empty: no copy.
stage={stage}
data={data}
"""
_CHECK_STAGING = """\
if [ -n "$stage" ]; then
    mistake=
    [ -n "$data" ] || mistake="STAGE=$stage: expected DATA, the data set to copy there, got none"
    case " $*" in *" --data.path"*) mistake="STAGE=$stage copies $data: leave --data.path out" ;; esac
    [ -z "$mistake" ] || { echo "error: $mistake" >&2; exit 2; }
fi
"""
_ARGUMENTS = """\

set -- {arguments} "$@"
"""
#: Bash hears a signal when a command in the foreground is over, or in a wait. 138 is 128 + 10: the wait was ended, or
#: what was waited for did not listen to the signal.
_RUN = """\

# SIGUSR1 before the time is up may come at any moment. What runs is told once: told twice, ranks would not save. Ranks
# that srun is only starting it tells nothing: they find a file.
signaled_at=
export ODC_MPI_STOP_FILE=$PWD/.odc-mpi-$SLURM_JOB_ID.stop
rm -f "$ODC_MPI_STOP_FILE"
trap 'trap "" USR1; signaled_at=$SECONDS; touch "$ODC_MPI_STOP_FILE"; kill -USR1 $! 2> /dev/null' USR1
run() {
    [ -z "$signaled_at" ] || return 138
    "$@" &
    [ -z "$signaled_at" ] || kill -USR1 $!
    wait $!
    local code=$?
    while [ "$code" -eq 138 ] && kill -0 $! 2> /dev/null; do
        wait $!
        code=$?
    done
    return "$code"
}
"""
_STAGE = """\

remove_copies() {
    rm -f "$local_data"
    timeout 30 srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --mpi=none rm -f "$local_data"
}
if [ -n "$stage" ]; then
    local_data=$stage/$SLURM_JOB_ID-${data##*/}
    trap 'kill $!; remove_copies; exit 143' TERM
    if ! run sbcast --force "$data" "$local_data" && [ -z "$signaled_at" ]; then
        echo "error: cannot copy $data to $stage on each node: see above" >&2
        remove_copies
        exit 1
    fi
    trap - TERM
    export ODC_MPI_STAGED_FILE=$local_data    # the ranks remove it as soon as all of them have it open
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
began=$SECONDS
run srun --kill-on-bad-exit=1 "${binding[@]}" "${container[@]}" odc-mpi train "$@"
code=$?
rm -f "$ODC_MPI_STOP_FILE"
# Told so early, some ranks may not have listened yet: then this was no failure.
if [ -n "$signaled_at" ] && [ "$code" -ne 0 ] && [ $((signaled_at - began)) -lt 120 ]; then
    code=75
fi
if [ -n "$stage" ] && [ "$code" -ne 0 ]; then
    remove_copies
fi
if [ -e "$ODC_MPI_STOPPED_FILE" ] || [ "$code" -eq 75 ]; then
    rm -f "$ODC_MPI_STOPPED_FILE"
    # By its number alone the last task of an array would stand for all of them.
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    exit 75                       # taken for the job's only if the requeue fails
fi
exit "$code"
"""
#: Seconds before the end of a job at which it is told to stop; Slurm may be up to a minute early.
SIGNAL_S = 120
#: Options of sbatch that a site may ask for; those that are not given stay comments.
_CHOICES = {
    "partition": "PARTITION",
    "account": "ACCOUNT",
    "gpus-per-node": "8",
    "mem": "0                 # all memory of each node",
    "exclusive": "",
}


@dataclass(frozen=True)
class SlurmJob:
    """The resources that a batch script asks Slurm for, and the command that it runs.

    Attributes:
        nodes: Number of nodes.
        ranks_per_node: Tasks on each node.
        cores_per_rank: Cores of a task.
        time: Time limit, as sbatch takes it.
        mpi: Value of srun --mpi, as a bash expression: see `unless_set`.
        name: Name of the job.
        choices: Further options of sbatch, by name.
        arguments: Arguments of odc-mpi train; the script takes more.
        stage: Directory on each node to copy the data set to; None reads the data set where it is.
        data: The data set to copy.
    """

    nodes: int = 1
    ranks_per_node: int = 8
    cores_per_rank: int = 8
    time: str = "04:00:00"
    mpi: str = "${SLURM_MPI_TYPE:-pmix}"
    name: str = "odc-mpi"
    choices: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    stage: str | None = None
    data: str | None = None


def training_script(job: SlurmJob, headline: str, usage: str, *, array: str = "", settings: str = "") -> str:
    """Return the batch script of a training.

    Args:
        job: Resources and command.
        headline: First line of the script: its purpose.
        usage: How to submit the script.
        array: The numbers of an array of jobs; none if empty.
        settings: Bash that gives each job of the array settings of its own.
    """
    staging = {
        "stage": shlex.quote(job.stage) if job.stage else "${STAGE:-}",
        "data": shlex.quote(job.data) if job.data else "${DATA:-}",
    }
    parts = [
        _HEAD.format(
            headline=headline,
            usage=usage,
            name=job.name,
            nodes=job.nodes,
            ranks=job.ranks_per_node,
            cores=job.cores_per_rank,
            time=job.time,
        ),
        *([f"#SBATCH --array={array}\n"] if array else []),
        _RESTART.format(signal_s=SIGNAL_S),
        _site(job, "%x-%A_%a.out" if array else "%x-%j.out"),
        _STAGING.format(**staging),
        _CHECK_STAGING,
        *([_ARGUMENTS.format(arguments=shlex.join(job.arguments))] if job.arguments else []),
        settings,
        *(_RUN, _STAGE, _BINDING, _TRAIN),
    ]
    return "".join(parts)


def submit(script: str) -> int:
    """Hand a batch script to sbatch, whose words and exit code become this program's.

    Raises:
        UserError: There is no sbatch.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("--submit: no sbatch on the PATH: run this where jobs are submitted, or leave --submit out")
    return subprocess.run([sbatch], input=script, text=True, check=False).returncode


def unless_set(mpi: str) -> str:
    """Return a bash expression for the value of srun --mpi: SLURM_MPI_TYPE, or `mpi` where it is unset."""
    return f"${{SLURM_MPI_TYPE:-{mpi}}}"


def script_for_config(job: SlurmJob, config: Path, overrides: tuple[str, ...], data: str) -> str:
    """Return the script that trains a configuration.

    Args:
        job: Resources; the command is filled in.
        config: The configuration, a file that every node has under the same name.
        overrides: Further arguments of odc-mpi train.
        data: The data set that the configuration names, for staging.
    """
    # As it was named: what a link stands for here may be another place on the nodes.
    arguments = ("--config", str(config.absolute()), *overrides)
    job = replace(job, arguments=arguments, data=data if job.stage else None)
    name = "".join(letter if letter.isprintable() else "?" for letter in config.name)  # in a comment of one line
    headline = f"Training of {name}: it saves before its time is up, queues again and goes on by itself."
    return training_script(job, headline, "sbatch FILE [--section.key value ...]")


def _site(job: SlurmJob, output: str) -> str:
    """Return the part of a script that a site changes, with the name of the log as sbatch takes it."""
    chosen = dict(job.choices)
    lines = [f"#SBATCH --{name}={chosen[name]}" for name in _CHOICES if name in chosen]
    left = [(name, example) for name, example in _CHOICES.items() if name not in chosen]
    if left:
        lines.append("# To choose for your site, with one # less:")
        lines += [f"##SBATCH --{name}{'=' if example else ''}{example}" for name, example in left]
    return _SITE.format(output=output, choices="\n".join(lines), mpi=job.mpi)
