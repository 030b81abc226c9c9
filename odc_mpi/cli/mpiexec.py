"""Run `odc-mpi` commands under mpiexec, from a process that does not use MPI itself."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from odc_mpi.errors import UserError

#: Environment variables for Open MPI, which by default refuses to run as root or with more ranks than cores, and whose
#: UCX component prints an error line for each window. MPICH ignores these variables.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Maximum number of ranks to start, unless the node has more cores. Each rank is a process that imports torch.
MAX_RANKS = 64
#: Seconds that mpiexec has to end the ranks after SIGTERM before it is killed. The ranks then end by themselves.
GRACE_S = 10.0


def run(ranks: int, arguments: Sequence[str], *, timeout_s: float) -> int:
    """Run `odc-mpi` with `arguments` on `ranks` ranks on this node, and wait until they end.

    The ranks inherit this process's standard streams. On SIGINT or SIGTERM, this function terminates mpiexec and raises
    KeyboardInterrupt. Returns the exit code of mpiexec or, if a signal killed mpiexec, 128 plus the signal number.

    Raises:
        UserError: mpiexec is not installed, or `ranks` exceeds the maximum for one node.
        TimeoutError: The ranks ran for longer than `timeout_s` seconds and were terminated.
    """
    max_ranks = max(MAX_RANKS, os.cpu_count() or 1)
    if ranks > max_ranks:
        raise UserError(
            f"--ranks {ranks}: expected at most {max_ranks} on this node: for more, run the command under mpiexec"
        )
    # SIGTERM raises KeyboardInterrupt, as Ctrl-C does: both end the ranks.
    with signals_handled(signal.default_int_handler, signal.SIGTERM), ExitStack() as stack:
        with _interrupts_deferred():  # an interrupt within Popen would leave mpiexec running
            process = subprocess.Popen(
                [mpiexec(), "-n", str(ranks), sys.executable, "-m", "odc_mpi", *arguments],
                env=_OPEN_MPI | os.environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends mpiexec cleanly
            )
            stack.callback(_end, process)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{ranks} ranks did not end within {timeout_s:g} s: raise --timeout-s") from None
    return code if code >= 0 else 128 - code


def mpiexec() -> str:
    """Return the path of mpiexec next to the Python executable or on the PATH. Raises `UserError` if there is none."""
    candidate = Path(sys.executable).with_name("mpiexec")
    path = str(candidate) if os.access(candidate, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise UserError(f"no mpiexec beside {sys.executable} or on the PATH: install odc_mpi[mpich] or load an MPI")
    return path


@contextmanager
def signals_handled(handler: Callable[..., object], *numbers: signal.Signals) -> Iterator[None]:
    """Context manager that handles the signals `numbers` with `handler`, and restores the previous handlers on exit."""
    previous = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler_before in zip(numbers, previous, strict=True):
            signal.signal(number, handler_before)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Context manager that, on SIGINT or SIGTERM, raises KeyboardInterrupt only at the end of the block."""
    received: list[int] = []
    try:
        with signals_handled(lambda number, frame: received.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if received:
            raise KeyboardInterrupt


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
