"""Batch scripts for Slurm and PBS that run `odc-mpi train`. jobs/batch_scripts.py writes those in jobs/.

Does not use MPI. The scripts are plain bash that users can edit, with site-specific settings at the top. Before the
time limit, Slurm or a timer signals only the script, which forwards the signal to the running command. The ranks save a
checkpoint, create a file that distinguishes this stop from a completed run, and exit. Then the job of Slurm requeues
itself, and that of PBS submits its script again.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from odc_mpi.errors import UserError

#: Folder of the templates, which have `@NAME@` in place of each text that `_fill` inserts. Bash handles a signal only
#: after a foreground command has ended, or during a `wait`. Exit code 138 (128 + SIGUSR1) means that the signal
#: interrupted the `wait`, or killed a command that does not handle it. Every task sees all GPUs of its node, because
#: tasks that see only one GPU could not map each other's memory.
_TEMPLATES = Path(__file__).parent
#: Time from the stop signal to the time limit, in seconds. Slurm may send the signal up to a minute earlier.
SIGNAL_S = 120
#: Options of sbatch that a site may require, with example values. Options that are not given are commented out.
_CHOICES = {
    "partition": "PARTITION",
    "account": "ACCOUNT",
    "gpus-per-node": "8",
    "mem": "0                 # all memory of each node",
    "exclusive": "",
}


@dataclass(frozen=True)
class SlurmJob:
    """Resources that a batch script requests from Slurm, and the command that the script runs.

    Attributes:
        headline: First line of the comment at the start of the script.
        usage: Command line that submits the script, shown in the same comment.
        mpi: Value for `srun --mpi`, as a bash expression.
        choices: Values of sbatch options that a site may require, keyed by the names in `_CHOICES`.
        arguments: Arguments for `odc-mpi train`, to which the script appends its own arguments.
        stage: Directory on each node to which the data set is copied, by default $STAGE. If that is not set either,
            nothing is copied.
        data: Path of the data set to copy, by default $DATA.
        archive: Path of a tar of a virtual environment that is unpacked on each node and used, by default $VENV_TAR.
        array: Value for `sbatch --array`, or "" for a single job.
        settings: Bash code, ending with a line break, that appends settings to the script's arguments.
        spares: Number of further nodes, which are used only in place of lost ones; if 0, $SPARES of them are.
    """

    headline: str
    usage: str
    nodes: int = 1
    ranks_per_node: int = 8
    cores_per_rank: int = 8
    time: str = "04:00:00"
    mpi: str = "${SLURM_MPI_TYPE:-pmix}"
    name: str = "odc-mpi"
    choices: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    stage: str | None = None
    data: str | None = None
    archive: str | None = None
    array: str = ""
    settings: str = ""
    spares: int = 0

    def script(self) -> str:
        """Return the text of the batch script."""
        texts = {
            **vars(self),
            "nodes": self.nodes + self.spares,
            "spares": self.spares or "${SPARES:-0}",
            "array": f"#SBATCH --array={self.array}\n" if self.array else "",
            "signal_s": SIGNAL_S,
            "output": "%x-%A_%a.out" if self.array else "%x-%j.out",
            "choices": _choices(self.choices),
            "stage": shlex.quote(self.stage) if self.stage else "${STAGE:-}",
            "data": shlex.quote(self.data) if self.data else "${DATA:-}",
            "archive": shlex.quote(self.archive) if self.archive else "${VENV_TAR:-}",
            "arguments": f'\nset -- {shlex.join(self.arguments)} "$@"\n' if self.arguments else "",
            "job_id": "$SLURM_JOB_ID",
        }
        return _fill("train.sbatch.in", texts)


@dataclass(frozen=True)
class PbsJob:
    """Resources that a batch script requests from PBS, and the arguments for `odc-mpi train`.

    Attributes:
        headline: First line of the comment at the start of the script.
        seconds: Time limit.
        choices: Values of the options -q and -A of qsub, and of the resource ngpus.
    """

    headline: str
    arguments: Sequence[str]
    nodes: int
    ranks_per_node: int
    cores_per_rank: int
    seconds: int
    name: str
    choices: Mapping[str, str]

    def script(self) -> str:
        """Return the text of the batch script."""
        minutes, gpus = divmod(self.seconds, 60)[0], self.choices.get("ngpus")
        options = [f"#PBS {name} {self.choices[name]}\n" for name in ("-q", "-A") if name in self.choices]
        texts = {
            **vars(self),
            "cores": self.ranks_per_node * self.cores_per_rank,
            "gpus": f":ngpus={gpus}" if gpus else "",
            "walltime": f"{minutes // 60:02}:{minutes % 60:02}:{self.seconds % 60:02}",
            "choices": "".join(options) or "# Options for your site: -q QUEUE, -A ACCOUNT.\n",
            "arguments": f"set -- {shlex.join(self.arguments)}\n",
            "job_id": "$PBS_JOBID",
            "signal_s": SIGNAL_S,
            "ranks": self.nodes * self.ranks_per_node,
        }
        return _fill("train.pbs.in", texts)


def submit(script: str, program: str) -> int:
    """Pass a script to sbatch or qsub, and return its exit code. Raises `UserError` if it is not on the PATH."""
    path = shutil.which(program)
    if path is None:
        raise UserError(f"--submit: no {program} on the PATH: run this on a login node, or remove --submit")
    return subprocess.run([path], input=script, text=True, check=False).returncode


def _fill(template: str, texts: Mapping[str, Any]) -> str:
    script, signals = ((_TEMPLATES / name).read_text(encoding="utf-8") for name in (template, "signals.sh.in"))
    # Optional parts have a line of their own in the template, and end with a line break.
    pattern = re.compile(r"^@(array|choices|arguments|settings)@\n|@(\w+)@", re.MULTILINE)
    return pattern.sub(lambda match: str(texts[match[1] or match[2]]), script.replace("@signals@\n", signals))


def _choices(chosen: Mapping[str, str]) -> str:
    """Return script lines for all options in `_CHOICES`. Those that are not in `chosen` are commented out."""
    lines = [f"#SBATCH --{name}={chosen[name]}" for name in _CHOICES if name in chosen]
    others = [(name, example) for name, example in _CHOICES.items() if name not in chosen]
    if others:
        lines.append("# Options for your site; remove one # to enable them:")
        lines += [f"##SBATCH --{name}{'=' if example else ''}{example}" for name, example in others]
    return "".join(f"{line}\n" for line in lines)
