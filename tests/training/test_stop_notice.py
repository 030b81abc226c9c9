"""What a signal prints. Open MPI's mpiexec forwards nothing after Ctrl-C, so its notice goes to the terminal."""

import os
import pty
import sys

import pytest

PROGRAM = "import signal; from odc_mpi.training.stop import _print_notice; _print_notice(signal.SIGINT)"


def on_a_terminal(variables):
    """Return what a program prints on a terminal of its own while its standard error is closed."""
    pid, terminal = pty.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.execve(sys.executable, [sys.executable, "-c", PROGRAM], {**os.environ, **variables})
    printed = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the end, on Linux
            part = b""
        if not part:
            break
        printed += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    return printed.decode()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PRTE_LAUNCHED": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "send SIGUSR1 to mpiexec"),
        ({"PRTE_LAUNCHED": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ""),
    ],
)
def test_with_open_mpi(variables, words):
    printed = on_a_terminal(variables)
    assert words in printed and bool(printed) == bool(words)
