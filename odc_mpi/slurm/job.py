"""Batch scripts for Slurm that train a configuration. jobs/batch_scripts.py writes templates from the same parts.

Does not use MPI. The scripts are plain bash that users can edit. Settings of a site are at the top. Before the time
limit, Slurm signals only the batch script, which forwards the signal to the running command. The ranks save a
checkpoint, exit, and leave a file that distinguishes this stop from a completed run. The job then requeues itself.
"""

import shlex
import shutil
import subprocess
from dataclasses import dataclass

from odc_mpi.errors import UserError

_HEAD = """\
#!/bin/bash
# {headline}
#
#     {usage}
#
# Options of sbatch override the lines #SBATCH, as in sbatch --nodes=4 ...
#
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks_per_node}       # ranks: one per GPU, or one per group of cores
#SBATCH --cpus-per-task={cores_per_rank}         # cores of a rank
#SBATCH --time={time}
"""
_RESTART = """\
#SBATCH --signal=B:USR1@{signal_s}     # seconds before the time limit: enough for one step and a checkpoint
#SBATCH --requeue
#SBATCH --open-mode=append        # one log for all starts of the job
"""
_SITE = """\
#SBATCH --output={output}
{choices}
# Also for your site: modules, an environment with odc-mpi on every node, a container.
#   module load ...
#   . venv/bin/activate
#   container=(apptainer exec --nv IMAGE)
container=()
# Process management interface: pmix for Open MPI, pmi2 for MPICH. srun --mpi=list shows the types of this Slurm.
export SLURM_MPI_TYPE={mpi}
"""
_STAGING = """\
# STAGE=DIR DATA=FILE: copy this data set to a local directory of each node, such as /tmp. Empty: no copy.
stage={stage}
data={data}
"""
_CHECK_STAGING = """\
if [ -n "$stage" ]; then
    error=
    [ -n "$data" ] || error="STAGE=$stage: expected DATA, the data set to copy there, but it is empty"
    case " $*" in *" --data.path"*) error="STAGE=$stage sets data.path to its copy of $data: remove --data.path" ;; esac
    [ -z "$error" ] || { echo "error: $error" >&2; exit 2; }
fi
"""
_ARGUMENTS = """\

set -- {arguments} "$@"
"""
#: Bash handles a signal after a command in the foreground has ended, or during a wait. 138 is 128 + SIGUSR1: the signal
#: interrupted the wait, or killed a command that does not handle it.
_RUN = """\

# SIGUSR1 before the time limit may arrive at any moment. It is forwarded once: after a second signal, ranks would exit
# without saving. Ranks that are still starting do not receive it; they find a file.
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
#: Every task can access all GPUs of its node. With one GPU each, tasks could not map each other's memory.
_BINDING = """\

binding=(--distribution=block --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --cpu-bind=cores --mem-bind=local)
binding+=(--gpu-bind=none)        # every rank maps the memory of all GPUs of its node
"""
_TRAIN = """\

# srun kills all ranks when one fails. Ranks that stop on request therefore exit with 0, and leave this file.
export ODC_MPI_STOPPED_FILE=$PWD/.odc-mpi-$SLURM_JOB_ID.stopped
rm -f "$ODC_MPI_STOPPED_FILE"
began=$SECONDS
run srun --kill-on-bad-exit=1 "${binding[@]}" "${container[@]}" odc-mpi train "$@"
code=$?
rm -f "$ODC_MPI_STOP_FILE"
# Soon after the start, some ranks may not handle the signal yet. Then this is not a failure.
if [ -n "$signaled_at" ] && [ "$code" -ne 0 ] && [ $((signaled_at - began)) -lt 120 ]; then
    code=75
fi
if [ -n "$stage" ] && [ "$code" -ne 0 ]; then
    remove_copies
fi
if [ -e "$ODC_MPI_STOPPED_FILE" ] || [ "$code" -eq 75 ]; then
    rm -f "$ODC_MPI_STOPPED_FILE"
    # The job ID alone of the last task of an array would mean the whole array.
    scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    exit 75                       # exit code of the job only if the requeue fails
fi
exit "$code"
"""
#: Time from the stop signal to the time limit, in seconds. Slurm may send the signal up to a minute earlier.
SIGNAL_S = 120
#: Options of sbatch that a site may require, with examples. Options that are not given are comments in the script.
_CHOICES = {
    "partition": "PARTITION",
    "account": "ACCOUNT",
    "gpus-per-node": "8",
    "mem": "0                 # all memory of each node",
    "exclusive": "",
}


@dataclass(frozen=True)
class SlurmJob:
    """Resources that a batch script requests from Slurm, and the command that it runs.

    Attributes:
        time: Time limit, in the format of sbatch.
        mpi: Value of `srun --mpi`, as a bash expression.
        choices: Further options of sbatch, as pairs of name and value.
        arguments: Arguments of `odc-mpi train`. Arguments given to the script are appended.
        stage: Directory on each node to which the data set is copied. None: the variable STAGE of the job's
            environment; without it, nothing is copied.
        data: Path of the data set to copy. None: the variable DATA of the job's environment.
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
    """Return the text of a batch script.

    Args:
        headline: Purpose of the script, for the comment at its start.
        usage: Command that submits the script, for the same comment.
        array: Value of `sbatch --array`. Empty: not a job array.
        settings: Bash code that appends settings to the arguments of the script, such as those of one job of the array.
    """
    stage = shlex.quote(job.stage) if job.stage else "${STAGE:-}"
    data = shlex.quote(job.data) if job.data else "${DATA:-}"
    parts = [
        _HEAD.format(headline=headline, usage=usage, **vars(job)),
        *([f"#SBATCH --array={array}\n"] if array else []),
        _RESTART.format(signal_s=SIGNAL_S),
        _site(job, "%x-%A_%a.out" if array else "%x-%j.out"),
        _STAGING.format(stage=stage, data=data),
        _CHECK_STAGING,
        *([_ARGUMENTS.format(arguments=shlex.join(job.arguments))] if job.arguments else []),
        settings,
        *(_RUN, _STAGE, _BINDING, _TRAIN),
    ]
    return "".join(parts)


def submit(script: str) -> int:
    """Submit a batch script with sbatch, which prints the job ID, and return its exit code.

    Raises `UserError` if sbatch is not on the PATH.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("--submit: no sbatch on the PATH: run this on a login node, or remove --submit")
    return subprocess.run([sbatch], input=script, text=True, check=False).returncode


def _site(job: SlurmJob, output: str) -> str:
    """Return the part of a script that a site edits; `output` is the file name of the log in the format of sbatch."""
    chosen = dict(job.choices)
    lines = [f"#SBATCH --{name}={chosen[name]}" for name in _CHOICES if name in chosen]
    others = [(name, example) for name, example in _CHOICES.items() if name not in chosen]
    if others:
        lines.append("# Options for your site; remove one # to enable them:")
        lines += [f"##SBATCH --{name}{'=' if example else ''}{example}" for name, example in others]
    return _SITE.format(output=output, choices="\n".join(lines), mpi=job.mpi)
