"""Whether the launcher and the MPI library fit together. Local.

Processes find each other through their launcher: by PMI (MPICH's mpiexec, srun --mpi=pmi2) or by PMIx (Open MPI's
mpiexec, srun --mpi=pmix). A library with the wrong protocol, or none, takes its process for a job of its own: every
process is rank 0 of 1, and all write over each other. MPICH under PMIx ends its processes and does not say what to do;
so the launcher is checked before MPI starts.
"""

import os

import mpi4py

from odc_mpi.errors import UserError

#: The value of srun --mpi for a library, by the beginning of the library's name.
SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}
#: Variables in which launchers give the number of processes; Slurm's is the last resort.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
_PMI = ("PMI_FD", "PMI_RANK", "PMI_PORT")


def check_before_start() -> None:
    """Refuse an MPICH without PMIx that was started through PMIx; start MPI where it may work. Local.

    Raises:
        UserError: MPICH would end this process without saying why.
    """
    if "PMIX_RANK" not in os.environ or any(name in os.environ for name in _PMI):
        return
    # Importing would start MPI, which is what may fail. Afterwards all is as if it had.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    # MPICH tells there how it was configured. Libraries that descend from it call themselves otherwise.
    if version.startswith("MPICH") and "pmix" not in version.lower():
        raise UserError(f"the launcher speaks PMIx, which this MPICH does not: {_cure('MPICH')}")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def check_launcher(library: str, size: int) -> None:
    """Check that MPI sees the processes that the launcher started. Local.

    Args:
        library: Name of the MPI library, as it gives it.
        size: Number of processes that MPI sees.

    Raises:
        UserError: MPI sees this process alone, and the launcher started more.
    """
    variable, started = _started()
    if started > 1 and size == 1:
        raise UserError(
            f"the launcher started {started} processes ({variable}), but {library} sees 1: {_cure(library)}"
        )


def hint() -> str | None:
    """Return advice for a start of MPI that fails, None if there is none. Local."""
    kinds = ", ".join(f"{kind} for {library}" for library, kind in SRUN_MPI.items())
    return f"Under srun, --mpi has to be {kinds}: srun --mpi=list shows what there is." if _is_slurm() else None


def srun_mpi() -> str:
    """Return the value of srun --mpi for the MPI library of this environment. Local; does not start MPI."""
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # no library here: a login node may have none
        return SRUN_MPI["Open MPI"]
    return next((kind for name, kind in SRUN_MPI.items() if MPI.Get_library_version().startswith(name)), "pmix")


def _started() -> tuple[str, int]:
    """Return the variable with the number of processes that the launcher started, and that number; 0 without one."""
    # An mpiexec within a Slurm job starts its helpers with srun: then Slurm's number is theirs.
    names = [name for name in _SIZES if name in os.environ] or [_SLURM_SIZE]
    sizes = [(int(os.environ.get(name) or 0), name) for name in names]
    size, name = max(sizes)
    return name, size


def _cure(library: str) -> str:
    wanted = next((kind for name, kind in SRUN_MPI.items() if library.startswith(name)), "pmix or --mpi=pmi2")
    own = "the mpiexec of the MPI library that this Python environment has"
    return f"try srun --mpi={wanted} (srun --mpi=list tells what there is), or {own}" if _is_slurm() else f"use {own}"


def _is_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ
