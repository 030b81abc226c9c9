"""Starts a command of ours under mpiexec, for who did not.

Nothing here knows MPI: this process only waits for mpiexec, passes its exit code on, and ends it when asked to end.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from odc_mpi.errors import UserError

#: Open MPI refuses root and more ranks than cores by default; its UCX component prints an error line per window.
#: MPICH ignores these.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
#: Ranks that are started on this node unless it has more cores: each is a process of its own, with torch in it.
MAX_RANKS = 64
#: An mpiexec that was asked to end gets this long to end its ranks, then it is killed; ranks notice that themselves.
GRACE_S = 10.0


def run(ranks: int, arguments: Sequence[str], *, timeout_s: float) -> int:
    """Run `odc-mpi` with these arguments on some ranks of this node, and wait for the end.

    The ranks inherit standard output and error. An interrupt or a SIGTERM to this process ends them all.

    Args:
        ranks: How many.
        arguments: Of `odc-mpi`.
        timeout_s: Seconds until everything is ended.

    Returns:
        The exit code: mpiexec's, or 128 plus the number of the signal that killed it.

    Raises:
        UserError: There is no mpiexec, or there are to be more ranks than a node bears.
        TimeoutError: It took longer than `timeout_s`; nothing runs any more.
    """
    max_ranks = max(MAX_RANKS, os.cpu_count() or 1)
    if ranks > max_ranks:
        raise UserError(
            f"--ranks {ranks}: expected at most {max_ranks} on this node; to have more, start mpiexec yourself"
        )
    with _terminated_as_interrupted(), ExitStack() as stack:
        with _interrupts_deferred():  # raised within Popen, an interrupt would leave mpiexec running
            process = subprocess.Popen(
                [mpiexec(), "-n", str(ranks), sys.executable, "-m", "odc_mpi", *arguments],
                env=_OPEN_MPI | os.environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which then ends mpiexec in good order
            )
            stack.callback(_end, process)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{ranks} ranks did not end within {timeout_s:g} s: raise --timeout-s") from None
    return code if code >= 0 else 128 - code


def mpiexec() -> str:
    """Return the mpiexec beside the running Python, which belongs to its MPI; else the one on the PATH.

    Raises:
        UserError: There is none.
    """
    candidate = Path(sys.executable).with_name("mpiexec")
    found = str(candidate) if os.access(candidate, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise UserError(f"no mpiexec beside {sys.executable} or on the PATH: install odc_mpi[mpich] or load an MPI")
    return found


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Turn SIGTERM into what Ctrl-C raises, so that both end the ranks."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a SIGINT or SIGTERM at the end of the block instead of within it."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
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
