"""Slurm batch scripts that run `odc-mpi train`. jobs/batch_scripts.py uses this module to write the scripts in jobs/.

Does not use MPI. The scripts are plain bash that users can edit, with site-specific settings at the top. Before the
time limit, Slurm signals only the batch script, which forwards the signal to the running command. The ranks save a
checkpoint, create a file that distinguishes this stop from a completed run, and exit. The job then requeues itself.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odc_mpi.errors import UserError

#: Template of the batch script, with `@NAME@` in place of each text that `SlurmJob.script` inserts. Bash handles a
#: signal only after a foreground command has ended, or during a `wait`. Exit code 138 (128 + SIGUSR1) means that the
#: signal interrupted the `wait`, or killed a command that does not handle it. Every task sees all GPUs of its node,
#: because tasks that see only one GPU could not map each other's memory.
_TEMPLATE = Path(__file__).with_name("train.sbatch.in")
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
        array: Value for `sbatch --array`, or "" for a single job.
        settings: Bash code, ending with a line break, that appends settings to the script's arguments.
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
    array: str = ""
    settings: str = ""

    def script(self) -> str:
        """Return the text of the batch script."""
        texts = {
            **vars(self),
            "array": f"#SBATCH --array={self.array}\n" if self.array else "",
            "signal_s": SIGNAL_S,
            "output": "%x-%A_%a.out" if self.array else "%x-%j.out",
            "choices": _choices(self.choices),
            "stage": shlex.quote(self.stage) if self.stage else "${STAGE:-}",
            "data": shlex.quote(self.data) if self.data else "${DATA:-}",
            "arguments": f'\nset -- {shlex.join(self.arguments)} "$@"\n' if self.arguments else "",
        }
        # Optional parts have a line of their own in the template, and end with a line break.
        pattern = re.compile(r"^@(array|choices|arguments|settings)@\n|@(\w+)@", re.MULTILINE)
        return pattern.sub(lambda match: str(texts[match[1] or match[2]]), _TEMPLATE.read_text(encoding="utf-8"))


def submit(script: str) -> int:
    """Pass a script to sbatch, and return sbatch's exit code. Raises `UserError` if sbatch is not on the PATH."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise UserError("--submit: no sbatch on the PATH: run this on a login node, or remove --submit")
    return subprocess.run([sbatch], input=script, text=True, check=False).returncode


def _choices(chosen: Mapping[str, str]) -> str:
    """Return script lines for all options in `_CHOICES`. Those that are not in `chosen` are commented out."""
    lines = [f"#SBATCH --{name}={chosen[name]}" for name in _CHOICES if name in chosen]
    others = [(name, example) for name, example in _CHOICES.items() if name not in chosen]
    if others:
        lines.append("# Options for your site; remove one # to enable them:")
        lines += [f"##SBATCH --{name}{'=' if example else ''}{example}" for name, example in others]
    return "".join(f"{line}\n" for line in lines)
