"""Ranks that stop while MPI starts or ends, outside of all deadlines of this package; and leftovers after the end."""

import json
import os
import pty
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from mpi_launch import MPIEXEC, environment, finish, launch, left_behind, start
from small_run import last_step

#: Waits before MPI is up, as a rank would that was stopped there; the others wait for it in MPI_Init.
LATE_START = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == 1:
    {what}
from odc_mpi.cli.main import main
sys.exit(main(["train", "--data.path", "none.h5", "--model.path", "none"]))
"""
#: One rank gets a request to stop while it imports the models.
STOPPED_START = """
import os, signal, sys
from odc_mpi.cli import main as cli
from odc_mpi.cli import train
imported = train.importlib.import_module
def import_module(name, *rest, **named):
    if name == "odc_mpi.models.build" and train.launched_rank() == 1:
        {what}
    return imported(name, *rest, **named)
train.importlib.import_module = import_module
sys.exit(cli.main(sys.argv[1:]))
"""
#: Leaves the world, and stops before MPI_Finalize.
LATE_END = """
import os, signal
import odc_mpi
world = odc_mpi.World(timeout_s=1)
world.gather_objects(None)
if world.rank == 1:
    world.close()
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(autouse=True)
def no_names_stay():
    """A job that ends before a `World` exists leaves what MPI put into /dev/shm at its start (docs/windows.md)."""
    before = set(Path("/dev/shm").iterdir())
    yield
    for path in left_behind(before):
        path.unlink(missing_ok=True)


def ended_within(job, seconds):
    done = finish(job)
    assert done.seconds < seconds
    return done


INTERRUPT = "import odc_mpi.cli.train as c; c.run = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())"


@pytest.mark.library
@pytest.mark.parametrize(
    ("ranks", "script", "limit_s", "words", "within_s"),
    [
        pytest.param(2, LATE_START.format(what="os.kill(os.getpid(), 19)"), 2, "", 50, marks=pytest.mark.quick),
        (2, LATE_START.format(what=INTERRUPT), 60, "odc-mpi: interrupted", 40),
        (3, LATE_END, 60, "", 60),
    ],
    ids=["stops before MPI is up", "is interrupted before MPI is up", "stops before it finalizes"],
)
def test_a_rank_that_no_deadline_of_a_world_sees_ends_the_job(ranks, script, limit_s, words, within_s):
    done = ended_within(start(ranks, "-c", script, ODC_MPI_START_TIMEOUT_S=limit_s), within_s)
    assert done.code != 0 and words in done.err


@pytest.mark.library
@pytest.mark.parametrize(
    "what",
    [
        "os.kill(os.getpid(), signal.SIGUSR1)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "open(os.environ['ODC_MPI_STOP_FILE'], 'w')",  # which ranks find that a signal could not reach
    ],
    ids=["SIGUSR1", "SIGINT", "file"],
)
def test_a_rank_that_is_stopped_while_it_starts_stops_the_job_cleanly(config, tmp_path, what):
    command = ("-c", STOPPED_START.format(what=what), "train", "--config", config)
    done = ended_within(start(2, *command, ODC_MPI_STOP_FILE=tmp_path / "stop"), 60)
    assert done.code == 75, done.err
    assert done.err.count("stopped on request before the first step") == 1
    assert not (tmp_path / "run").exists(), "what an earlier run left is not touched"


@pytest.mark.library
def test_ctrl_c_on_a_terminal_saves_or_names_the_signal_that_saves(config, tmp_path):
    """MPICH's mpiexec lets the ranks save. That of Open MPI ends them soon, so their last line names another signal."""
    words = [MPIEXEC, "-n", "2", sys.executable, "-m", "odc_mpi", "train", "--config", str(config)]
    pid, terminal = pty.fork()
    if not pid:
        os.execve(MPIEXEC, [*words, "--run.steps", "100000"], environment(ODC_MPI_PROGRESS="plain"))
    printed, deadline = "", time.monotonic() + 90
    with suppress(OSError):  # at the end, on Linux
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            before, printed = printed, printed + os.read(terminal, 4096).decode(errors="replace")
            if " 3/100000" in printed and " 3/100000" not in before:
                os.write(terminal, b"\x03")
    os.kill(pid, signal.SIGTERM)  # if it still runs
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    last = printed.rstrip().split("\n")[-1]
    if "Open MPI" in printed:
        assert code == 1 and "send SIGUSR1 to mpiexec" in last
    else:
        assert code == 75 and "checkpoint saved. Run the same command to resume" in last
        step = last_step(tmp_path / "run")
        assert step >= 3 and json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]


@pytest.mark.parametrize(
    ("before", "output"), [("sys.stderr = io.StringIO()", r"last \udcff words"), ("os.close(2)", "")]
)
def test_last_words_reach_the_terminal_if_there_is_one(before, output):
    script = f"import io, os, sys; from odc_mpi.runtime.abort import abort; {before}; abort('last \\udcff words')"
    done = ended_within(start(2, "-c", script), 40)
    assert done.code != 0
    assert output in done.err


@pytest.mark.library
@pytest.mark.quick
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"], ids=["ends", "killed"])
def test_a_process_alone_leaves_no_name_behind(end):
    """Open MPI leaves one of a process that no launcher started."""
    before = set(Path("/dev/shm").iterdir())
    launch(0, "-c", f"import os, odc_mpi; world = odc_mpi.World(); {end}")
    assert not left_behind(before)


@pytest.mark.quick
@pytest.mark.parametrize("words", ["0", "-1", "soon"])
def test_a_limit_that_is_none_is_the_usual_one(words, monkeypatch):
    from odc_mpi.runtime import ranks

    monkeypatch.setenv("ODC_MPI_START_TIMEOUT_S", words)
    before = signal.getsignal(signal.SIGALRM)
    with ranks.mpi_startup():
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert ranks.START_S - 5 < left <= ranks.START_S
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


#: Handlers of `atexit` run in reverse order, and MPI_Finalize after the last one.
FAILS_TO_CLOSE = """
import atexit, signal
atexit.register(lambda: print("limited", signal.getitimer(signal.ITIMER_REAL)[0] > 0))
import odc_mpi
odc_mpi.World().on_close(lambda: 1 / 0)
"""


@pytest.mark.quick
def test_mpi_finalize_has_a_limit_even_if_a_world_fails_to_close():
    done = finish(start(0, "-c", FAILS_TO_CLOSE))
    assert "limited True" in done.out.split("\n") and "ZeroDivisionError" in done.err


#: A child of rank 1 fails, without a call of MPI.
FORKS = """
import os
import odc_mpi
world = odc_mpi.World(timeout_s=30)
if world.rank == 1:
    pid = os.fork()
    if not pid:
        raise RuntimeError("in the child")
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(world.gather_objects(world.rank))
"""


@pytest.mark.library
@pytest.mark.quick
def test_a_forked_child_that_fails_is_no_rank():
    done = finish(start(2, "-c", FORKS))
    assert done.code == 0, done.err
    assert done.out.count("[0, 1]") == 2 and done.out.count("child 1") == 1
    assert done.err.count("RuntimeError: in the child") == 1 and "odc_mpi:" not in done.err
