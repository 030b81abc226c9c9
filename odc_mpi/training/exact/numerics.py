"""The arithmetic of a run: processor, libraries, threads and whatever else decides the last bits of a computation.

An exact run tells its arithmetic in summary.json and in its checkpoints. If ranks differed in it, bits would depend on
which rank runs which microbatch; and a run that goes on under another arithmetic has other bits from there on.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.runtime.world import World
from odc_mpi.training.rundir.resume import ResumePoint

#: Environment variables by which libraries below torch are told what instructions to use.
NUMERICS_ENV_VARS = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
_CPUINFO = Path("/proc/cpuinfo")


def check_numerics(device: str, world: World, resume_point: ResumePoint | None) -> dict[str, str]:
    """Return the arithmetic of this run, compared between ranks and with the checkpoint; may warn. Collective.

    Args:
        device: On which the model computes, cpu or cuda.
        world: The ranks.
        resume_point: The checkpoint that the run begins at. If it goes on with a run of its own, it is compared with that.

    Raises:
        AgreedError: Ranks, or the checkpoint's run and this one, are to compute in other ways.
    """
    current = numerics_fingerprint(device)
    require_same_numerics(current, world)
    previous = resume_point.metadata.get("arithmetic") if resume_point and resume_point.continues_this_run else None
    if resume_point and previous:
        changes = world.run_on_all(
            lambda: numerics_differences(current, previous, str(resume_point.checkpoint.directory))
        )
        if changes and world.rank == 0:
            warn(f"WARNING: run.exact: {', '.join(changes)} since the checkpoint: last bits may be others from here on")
    return current


def numerics_fingerprint(device: str) -> dict[str, str]:
    """Return the facts that decide the last bits of a computation, by their names.

    Args:
        device: On which the model computes, cpu or cuda.
    """
    fingerprint = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "run.threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        fingerprint["GPU"] = torch.cuda.get_device_name()
    return fingerprint | {name: os.environ.get(name, "not set") for name in NUMERICS_ENV_VARS}


def require_same_numerics(fingerprint: Mapping[str, str], world: World) -> None:
    """Check that all ranks have the same arithmetic; warn of processors of several names. Collective.

    Raises:
        AgreedError: They do not; on every rank.
    """
    fingerprints = world.gather_objects(dict(fingerprint))
    for name, first in fingerprints[0].items():
        rank = next((rank for rank, each in enumerate(fingerprints) if each.get(name) != first), None)
        if rank is None:
            continue
        values = f"{first} on rank 0, {fingerprints[rank].get(name)} on rank {rank}"
        if name != "processor":
            raise AllRanksUserError(f"{name}: expected the same on every rank with run.exact, got {values}")
        if world.rank == 0:
            warn(f"WARNING: run.exact: processors are {values}: the last bits may depend on which rank computes what")


def numerics_differences(current: Mapping[str, str], previous: Mapping[str, str], checkpoint: str) -> list[str]:
    """Return the facts that differ from those of a run before, in words.

    Args:
        current: Of this run.
        previous: Of the run that saved the checkpoint.
        checkpoint: The checkpoint.

    Raises:
        UserError: The number of threads does, which is a setting.
    """
    changed = {name: (old, current.get(name, "none")) for name, old in previous.items() if current.get(name) != old}
    if "run.threads" in changed:
        old, new = changed["run.threads"]
        raise UserError(
            f"run.threads: expected {old} with run.exact, as in the checkpoint {checkpoint}, got {new}: set run.threads to "
            f"{old}, or begin a run of its own there: run.resume {checkpoint} with another run.dir"
        )
    return [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]


def _processor() -> str:
    """Return the name of the processor with its numbers, as Linux has them; empty where there are none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return ", ".join(
        f"{name} {fields[name]}" if name != "model name" else fields[name] for name in names if name in fields
    )
