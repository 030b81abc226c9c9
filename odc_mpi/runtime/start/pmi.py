"""Whether the launcher and the MPI library fit together.

Processes find each other through their launcher: by PMI (MPICH's mpiexec, srun --mpi=pmi2) or by PMIx (Open MPI's
mpiexec, srun --mpi=pmix). A library with the wrong protocol, or none, takes its process for a job of its own: every
process is rank 0 of 1, and all write over each other. MPICH under PMIx ends its processes and does not say what to do;
so the launcher is checked before MPI starts.

`PmiRelay` stands between a launcher and a process that takes another's place in the job (`runtime.start.launch`).
"""

import os
import socket
import threading
import time
from contextlib import suppress

from odc_mpi.errors import UserError

#: The value of srun --mpi for a library, by the beginning of the library's name.
SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}
#: Variables in which launchers give the number of processes; Slurm's is the last resort.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
_PMI = ("PMI_FD", "PMI_RANK", "PMI_PORT")
#: Seconds for the launcher to forward printed lines before it is asked to end the job.
_FORWARD_S = 0.2


def check_before_start() -> None:
    """Refuse an MPICH without PMIx that was started through PMIx; start MPI where it may work.

    Raises:
        UserError: MPICH would end this process without saying why.
    """
    if "PMIX_RANK" not in os.environ or any(name in os.environ for name in _PMI):
        return
    # Importing would start MPI, which is what may fail. Afterwards all is as if it had.
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    # MPICH tells there how it was configured. Libraries that descend from it call themselves otherwise.
    if version.startswith("MPICH") and "pmix" not in version.lower():
        raise UserError(f"the launcher speaks PMIx, which this MPICH does not: {_advice('MPICH')}")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def check_launcher(library: str, size: int) -> None:
    """Check that MPI sees the processes that the launcher started.

    Args:
        library: Name of the MPI library, as it gives it.
        size: Number of processes that MPI sees.

    Raises:
        UserError: MPI sees this process alone, and the launcher started more.
    """
    variable, started = _started()
    if started > 1 and size == 1:
        raise UserError(
            f"the launcher started {started} processes ({variable}), but {library} sees 1: {_advice(library)}"
        )


def hint() -> str | None:
    """Return advice for a start of MPI that fails, None if there is none."""
    kinds = ", ".join(f"{kind} for {library}" for library, kind in SRUN_MPI.items())
    return f"Under srun, --mpi has to be {kinds}: srun --mpi=list shows what there is." if _is_slurm() else None


def srun_mpi() -> str:
    """Return the value of srun --mpi for the MPI library of this environment. Local; does not start MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # no library here: a login node may have none
        return SRUN_MPI["Open MPI"]
    return next((kind for name, kind in SRUN_MPI.items() if MPI.Get_library_version().startswith(name)), "pmix")


def _started() -> tuple[str, int]:
    """Return the variable with the number of processes that the launcher started, and that number; 0 without one."""
    # An mpiexec within a Slurm job starts its helpers with srun: then Slurm's number is theirs.
    names = [name for name in _SIZE_VARIABLES if name in os.environ] or [_SLURM_SIZE]
    sizes = [(int(os.environ.get(name) or 0), name) for name in names]
    size, name = max(sizes)
    return name, size


def _advice(library: str) -> str:
    wanted = next((kind for name, kind in SRUN_MPI.items() if library.startswith(name)), "pmix or --mpi=pmi2")
    own = "the mpiexec of the MPI library that this Python environment has"
    return f"try srun --mpi={wanted} (srun --mpi=list tells what there is), or {own}" if _is_slurm() else f"use {own}"


def _is_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


class PmiRelay:
    """Stands between the child and a launcher that speaks PMI over a socket, and swallows requests to abort the job.

    Each message of either version of PMI is written at once and answered before the next. PMIx does without: there the
    environment stays as it is.
    """

    def __init__(self) -> None:
        self.abort_was_asked = False
        self.environment: dict[str, str] = {}
        self._is_open = False
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        with suppress(ValueError, OSError):
            self._launcher = int(os.environ.get("PMI_FD", ""))
            os.set_inheritable(self._launcher, False)
            self._sockets = socket.socketpair()
            self._sockets[1].set_inheritable(True)
            self.environment = {"PMI_FD": str(self._sockets[1].fileno())}

    def start(self) -> None:
        """Begin to relay, once the child has its end of the connection."""
        if self._sockets is not None:
            self._sockets[1].close()
            child = self._sockets[0].fileno()
            for source, sink in ((child, self._launcher), (self._launcher, child)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def leave(self, rank: int) -> None:
        """Close the PMI connection in order if the child could not; else the launcher reports a failure."""
        if not self._is_open:
            return
        message = b"cmd=finalize\n"
        if rank == 0 and os.environ.get("MPI_LOCALNRANKS") != os.environ.get("PMI_SIZE"):
            # Ranks on other nodes do not see that they are no longer needed.
            message = b"cmd=abort exitcode=0\n"
            time.sleep(_FORWARD_S)
        with suppress(OSError):
            os.write(self._launcher, message)

    def _relay(self, source: int, sink: int) -> None:
        with suppress(OSError):  # the other side has ended
            while message := os.read(source, 1 << 16):
                if source == self._launcher:
                    os.write(sink, message)
                elif b"cmd=abort" in message:
                    self.abort_was_asked = True
                else:
                    self._follow(message)
                    os.write(sink, message)

    def _follow(self, message: bytes) -> None:
        if message.startswith(b"cmd=init pmi_version=1 "):
            self._is_open = True
        elif message.startswith(b"cmd=finalize"):
            self._is_open = False
