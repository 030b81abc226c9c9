"""Compatibility checks for the launcher and the MPI library, and a relay for PMI messages.

Processes find each other through their launcher, using the PMI protocol (MPICH's mpiexec, srun --mpi=pmi2) or the PMIx
protocol (Open MPI's mpiexec, srun --mpi=pmix). With the wrong protocol or none, every process becomes rank 0 of 1, and
the processes overwrite each other's files. Under a PMIx launcher, an MPICH without PMIx support ends its processes
without an explanation, so the launcher is checked before MPI starts.

`PmiRelay` connects the launcher to a child process that acts as a rank (`runtime.start.launch`).
"""

import os
import socket
import threading
import time
from contextlib import suppress

from odc_mpi.errors import UserError

#: Value of srun's --mpi option for each MPI library, keyed by the prefix of the library's name.
SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}
#: Environment variables that contain the number of processes. Slurm's variable is used only if neither of these is set.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_SLURM_SIZE = "SLURM_STEP_NUM_TASKS"
_PMI = ("PMI_FD", "PMI_RANK", "PMI_PORT")
#: Seconds that the launcher has to forward printed lines before it is asked to end the job.
_FORWARD_S = 0.2


def check_before_start() -> None:
    """Raise `UserError` if the launcher uses PMIx and the MPI library is MPICH without PMIx support.

    Such a library would end this process without an explanation. Otherwise, under PMIx, this function initializes MPI.
    Under other launchers, importing `mpi4py.MPI` initializes MPI.
    """
    if "PMIX_RANK" not in os.environ or any(name in os.environ for name in _PMI):
        return
    # The import must not start MPI, since that may fail. MPI_Finalize still runs at exit.
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    version = MPI.Get_library_version()
    # The version of MPICH contains its configuration. Libraries based on MPICH have other names.
    if version.startswith("MPICH") and "pmix" not in version.lower():
        raise UserError(f"the launcher uses PMIx, which this MPICH does not support: {_advice('MPICH')}")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)


def check_launcher(library: str, size: int) -> None:
    """Raise `UserError` if the launcher started several processes, but `size`, the size of MPI_COMM_WORLD, is 1."""
    # mpiexec in a Slurm job starts its helper processes with srun, and the Slurm variable counts those.
    names = [name for name in _SIZE_VARIABLES if name in os.environ] or [_SLURM_SIZE]
    started, variable = max((int(os.environ.get(name) or 0), name) for name in names)
    if started > 1 and size == 1:
        raise UserError(
            f"the launcher started {started} processes ({variable}), but {library} sees 1: {_advice(library)}"
        )


def srun_advice() -> str | None:
    """Return advice on srun's --mpi option for users whose MPI does not start, or None outside Slurm jobs."""
    kinds = ", ".join(f"{kind} for {library}" for library, kind in SRUN_MPI.items())
    return f"srun --mpi must be {kinds}: srun --mpi=list shows the available types." if _is_slurm() else None


def srun_mpi() -> str:
    """Return the value for `srun --mpi` that suits this MPI library, or "pmix" if the library is missing or unknown.

    Does not initialize MPI.
    """
    import mpi4py

    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # a login node may have no MPI library
        return SRUN_MPI["Open MPI"]
    return next((kind for name, kind in SRUN_MPI.items() if MPI.Get_library_version().startswith(name)), "pmix")


def _advice(library: str) -> str:
    wanted = next((kind for name, kind in SRUN_MPI.items() if library.startswith(name)), "pmix or --mpi=pmi2")
    mpiexec = "the mpiexec of the MPI library in this Python environment"
    return f"try srun --mpi={wanted} (see srun --mpi=list), or {mpiexec}" if _is_slurm() else f"use {mpiexec}"


def _is_slurm() -> bool:
    return "SLURM_JOB_ID" in os.environ


class PmiRelay:
    """Relay for messages between a child process and a PMI launcher. Does nothing under other launchers.

    The child needs the variables in `environment`. Its requests to abort the job are not forwarded, but set
    `abort_requested`. In PMI 1 and PMI 2, a message arrives in one read and is answered before the next one is sent.
    """

    def __init__(self) -> None:
        self.abort_requested = False
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
        """Start forwarding messages. Call this after starting the child process."""
        if self._sockets is not None:
            self._sockets[1].close()
            child = self._sockets[0].fileno()
            for source, sink in ((child, self._launcher), (self._launcher, child)):
                threading.Thread(target=self._relay, args=(source, sink), daemon=True).start()

    def leave(self, rank: int) -> None:
        """Close the PMI connection if the child left it open, because the launcher would otherwise report a failure.

        `rank` is the rank of this process. In a job on several nodes, rank 0 asks the launcher to end the job instead.
        """
        if not self._is_open:
            return
        message = b"cmd=finalize\n"
        if rank == 0 and os.environ.get("MPI_LOCALNRANKS") != os.environ.get("PMI_SIZE"):
            # Parents on other nodes cannot see that they are no longer needed.
            message = b"cmd=abort exitcode=0\n"
            time.sleep(_FORWARD_S)
        with suppress(OSError):
            os.write(self._launcher, message)

    def _relay(self, source: int, sink: int) -> None:
        with suppress(OSError):  # the other process has ended
            while message := os.read(source, 1 << 16):
                if source == self._launcher:
                    os.write(sink, message)
                elif b"cmd=abort" in message:
                    self.abort_requested = True
                else:
                    if message.startswith((b"cmd=init pmi_version=1 ", b"cmd=finalize")):
                        self._is_open = message.startswith(b"cmd=init")
                    os.write(sink, message)
