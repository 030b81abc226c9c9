"""Numerics fingerprint: processor, torch, threads and environment variables that affect the last bits of results.

An exact run stores its fingerprint in summary.json and in checkpoints, under the key `arithmetic`. If ranks have
different fingerprints, the last bits depend on which rank runs a microbatch. If a run resumes with a different
fingerprint, the last bits may differ from that step on.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.runtime.world import World
from odc_mpi.training.rundir.resume import ResumePoint

#: Environment variables that determine which instructions the libraries called by torch use.
NUMERICS_ENV_VARS = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
_CPUINFO = Path("/proc/cpuinfo")


def check_numerics(device: str, world: World, resume_point: ResumePoint | None) -> dict[str, str]:
    """Compare the numerics fingerprints of all ranks, and return the fingerprint of this rank. Collective.

    Different processors cause only a warning; any other difference between ranks raises `AllRanksUserError`. If the run
    resumes from its own checkpoint, the fingerprint is also compared with the one stored there, if any: a different
    `run.threads` raises `AllRanksUserError`, and any other difference causes only a warning.
    """
    current = numerics_fingerprint(device)
    fingerprints = world.gather_objects(current)
    for name, first in fingerprints[0].items():
        rank = next((rank for rank, each in enumerate(fingerprints) if each.get(name) != first), None)
        if rank is None:
            continue
        values = f"{first} on rank 0, {fingerprints[rank].get(name)} on rank {rank}"
        if name != "processor":
            raise AllRanksUserError(f"{name}: expected the same on every rank with run.exact, got {values}")
        if world.rank == 0:
            warn(f"WARNING: run.exact: processors are {values}: the last bits may depend on which rank computes what")
    previous = resume_point.metadata.get("arithmetic") if resume_point and resume_point.continues_this_run else None
    if resume_point and previous:
        changes = world.run_on_all(
            lambda: numerics_differences(current, previous, str(resume_point.checkpoint.directory))
        )
        if changes and world.rank == 0:
            warn(f"WARNING: run.exact: {', '.join(changes)} since the checkpoint: last bits may differ from here on")
    return current


def numerics_fingerprint(device: str) -> dict[str, str]:
    """Return the numerics fingerprint for a device (cpu or cuda), as a dictionary that maps names to values."""
    fingerprint = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "run.threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        fingerprint["GPU"] = torch.cuda.get_device_name()
    return fingerprint | {name: os.environ.get(name, "not set") for name in NUMERICS_ENV_VARS}


def numerics_differences(current: Mapping[str, str], previous: Mapping[str, str], checkpoint: str) -> list[str]:
    """Return "NAME OLD -> NEW" for each change since the checkpoint. Raises `UserError` if `run.threads` changed."""
    changed = {name: (old, current.get(name, "none")) for name, old in previous.items() if current.get(name) != old}
    if "run.threads" in changed:
        old, new = changed["run.threads"]
        raise UserError(
            f"run.threads: expected {old} with run.exact, as in the checkpoint {checkpoint}, got {new}: set it so, "
            f"or start a new run: run.resume {checkpoint} with another run.dir"
        )
    return [f"{name} {old} -> {new}" for name, (old, new) in changed.items()]


def _processor() -> str:
    """Return the name and the model numbers of the processor in /proc/cpuinfo, or "" if they are unknown."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return ", ".join(f"{name} {fields[name]}" for name in names if name in fields).removeprefix("model name ")
