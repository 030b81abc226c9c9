"""The arithmetic of a run: processor, libraries, threads and whatever else decides the last bits of a computation.

An exact run tells its arithmetic in summary.json and in its checkpoints. If ranks differed in it, bits would depend on
which rank runs which microbatch; and a run that goes on under another arithmetic has other bits from there on.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from odc_mpi.errors import AgreedError, UserError, warn
from odc_mpi.runtime.world import World
from odc_mpi.train.rundir.resume import Origin

#: Environment variables by which libraries below torch are told what instructions to use.
FORCING = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
_CPUINFO = Path("/proc/cpuinfo")


def checked_arithmetic(device: str, world: World, origin: Origin | None) -> dict[str, str]:
    """Return the arithmetic of this run, compared between ranks and with the checkpoint; may warn. Collective.

    Args:
        device: On which the model computes, cpu or cuda.
        world: The ranks.
        origin: The checkpoint that the run begins at. If it goes on with a run of its own, it is compared with that.

    Raises:
        AgreedError: Ranks, or the checkpoint's run and this one, are to compute in other ways.
    """
    own = arithmetic(device)
    require_alike(own, world)
    before = origin.about.get("arithmetic") if origin and origin.own else None
    if origin and before:
        changed = world.agree(lambda: differences(own, before, str(origin.checkpoint.directory)))
        if changed and world.rank == 0:
            warn(f"WARNING: run.exact: {', '.join(changed)} since the checkpoint: last bits may be others from here on")
    return own


def arithmetic(device: str) -> dict[str, str]:
    """Return the facts that decide the last bits of a computation, by their names. Local.

    Args:
        device: On which the model computes, cpu or cuda.
    """
    own = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "run.threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        own["GPU"] = torch.cuda.get_device_name()
    return own | {name: os.environ.get(name, "not set") for name in FORCING}


def require_alike(own: Mapping[str, str], world: World) -> None:
    """Check that all ranks have the same arithmetic; warn of processors of several names. Collective.

    Raises:
        AgreedError: They do not; on every rank.
    """
    everyone = world.gather_objects(dict(own))
    for name, first in everyone[0].items():
        rank = next((rank for rank, each in enumerate(everyone) if each.get(name) != first), None)
        if rank is None:
            continue
        told = f"{first} on rank 0, {everyone[rank].get(name)} on rank {rank}"
        if name != "processor":
            raise AgreedError(f"{name}: expected the same on every rank with run.exact, got {told}")
        if world.rank == 0:
            warn(f"WARNING: run.exact: processors are {told}: the last bits may depend on which rank computes what")


def differences(own: Mapping[str, str], before: Mapping[str, str], where: str) -> list[str]:
    """Return the facts that differ from those of a run before, in words. Local.

    Args:
        own: Of this run.
        before: Of the run that saved the checkpoint.
        where: The checkpoint.

    Raises:
        UserError: The number of threads does, which is a setting.
    """
    changed = {name: (told, own.get(name, "none")) for name, told in before.items() if own.get(name) != told}
    if "run.threads" in changed:
        told, now = changed["run.threads"]
        raise UserError(
            f"run.threads: expected {told} with run.exact, as in the checkpoint {where}, got {now}: set run.threads to "
            f"{told}, or begin a run of its own there: run.resume {where} with another run.dir"
        )
    return [f"{name} {told} -> {now}" for name, (told, now) in changed.items()]


def _processor() -> str:
    """Return the name of the processor with its numbers, as Linux has them; empty where there are none."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return ", ".join(f"{name} {told[name]}" if name != "model name" else told[name] for name in names if name in told)
