"""The decisions of `odc-mpi run`, with programs in place of ranks that leave in the run directory what ranks leave."""

import json
import os
import signal
import socket
import sys
import textwrap
import threading
import time

import pytest

from odc_mpi.cli import main as cli
from odc_mpi.cli import run
from odc_mpi.observe.metrics import read_run_metrics
from odc_mpi.supervisor import supervisor
from odc_mpi.supervisor.launchers import Host, Mpiexec, is_same_host, place_ranks
from odc_mpi.supervisor.supervisor import Commands, Supervisor
from odc_mpi.training.rundir.run_dir_lock import is_held

#: A rank of a pretended run, whose checkpoints are of steps 0, 10, 20: `run(3)` opens the directory, and takes 3 steps.
RANK = """
import json, os, sys, time
from datetime import datetime
from pathlib import Path
directory, start = Path(sys.argv[1]), int(sys.argv[2])
def run(steps, checkpoint=0):
    (directory / "owner.json").write_text(json.dumps({"step": checkpoint, "time_ns": time.time_ns()}))
    line = {"step_s": 0.1, "skipped": False, "time": datetime.now().astimezone().isoformat()}
    path = directory / "metrics.jsonl"
    old = path.read_text().splitlines()[:checkpoint] if checkpoint else []
    lines = [json.dumps({"step": step, **line}) for step in range(len(old) + 1, checkpoint + steps + 1)]
    lines = [f"{text}\\n" for text in (*old, *lines)]
    (directory / "metrics.jsonl").write_text("".join(lines))
def fail(host="h1", **more):
    record = {"rank": 1, "host": host, "activity": "", "error": "broken", **more}
    Path(os.environ["ODC_MPI_FAILURE_FILE"]).write_text(json.dumps(record))
def close():
    time.sleep(0.1)  # some polls of the supervisor
    (directory / "owner.json").unlink()
    (directory / "summary.json").write_text('{"steps": 9}')
"""


class Launcher:
    """Counts starts; hosts in `dead` do not answer."""

    def __init__(self, hosts, directory, dead=()):
        self.hosts, self.directory, self.dead, self.starts = hosts, directory, dead, []

    def command(self, hosts):
        self.starts.append([host.name for host in hosts])
        return []

    def on_host(self, host, *command):
        if command != ("true",):
            return [word.format(host=host.name) for word in command]
        return [sys.executable, "-c", f"raise SystemExit({host.name in self.dead})"]


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """Return a function that supervises programs, one for each start (the last one for all others)."""
    for name in ("ODC_MPI_FAILURE_FILE", "ODC_MPI_STOPPED_FILE", "SLURM_JOB_NODELIST"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(supervisor, "_POLL_S", 0.02)

    def supervised(*programs, hosts=("h1", "h2", "h3"), ranks=6, min_ranks=1, max_restarts=9, dead=(), rescue=None):
        launcher = Launcher([Host(name, 2) for name in hosts], tmp_path, dead)
        paths = []
        for number, program in enumerate(programs):
            paths.append(tmp_path / f"rank{number}.py")
            paths[-1].write_text(RANK + textwrap.dedent(program))

        class Numbered(list):
            def __iter__(self):
                path = paths[min(len(launcher.starts), len(paths)) - 1]
                return iter([sys.executable, str(path), str(tmp_path / "run"), str(len(launcher.starts)), *self[:]])

        commands, limits = Commands(Numbered(), Numbered(["resumed"]), rescue), (ranks, min_ranks, max_restarts)
        return Supervisor(launcher, commands, tmp_path / "run", *limits).run(), launcher

    return supervised


def last_step(run_dir):
    return max((line["step"] for line in read_run_metrics(run_dir, 99)), default=0)


def summary(tmp_path):
    return json.loads((tmp_path / "run" / "summary.json").read_text())


DONE = "run(9); close()"
TRAIN = ["train", "--model.path", "m", "--data.path", "d"]


@pytest.mark.parametrize(
    ("programs", "code", "starts", "words"),
    [
        ((DONE,), 0, 1, ""),
        (("exit(2)",), 2, 1, ""),
        (("exit(75)",), 75, 1, ""),
        (("run(3); Path(os.environ['ODC_MPI_STOPPED_FILE']).touch()",), 75, 1, ""),
        # Two starts in a row without a step, which are not counted after one with steps.
        (("exit(1)",), 1, 2, "2 starts in a row ended before their first step"),
        (("run(0); exit(1)",), 1, 2, "2 starts in a row"),
        (("exit(1)", "run(3); exit(1)", "exit(1)", DONE), 0, 4, "restart 3 of at most 9"),
        # mpiexec may return 0 although a rank died with the directory open.
        (("run(3)", DONE), 0, 2, "ended with exit code 1, after step 3"),
        (("run(3); os.kill(os.getpid(), 9)", DONE), 0, 2, "ended with exit code 137, after step 3"),
        (("run(3); fail(); exit(1)", DONE), 0, 2, "rank 1 on h1 failed (broken), after step 3"),
        (("run(3); fail(final=True); exit(1)",), 1, 1, ""),
        (("run(start); exit(1)",), 1, 10, "not started again: --max-restarts 9"),
        (("run(3); fail(); exit(1)",), 1, 2, "the same failure at the same step twice"),
        (("run(3); fail(); exit(1)", "run(3); exit(1)", "run(3); fail(); exit(1)", DONE), 0, 4, "restart 3"),
        # A launcher that waits for a lost host is ended.
        (("run(3); fail(); time.sleep(60)", DONE), 0, 2, "restart 1"),
    ],
)
def test_what_ends_a_run_and_what_starts_it_again(
    supervise, tmp_path, monkeypatch, capfd, programs, code, starts, words
):
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.3)
    found, launcher = supervise(*programs)
    output = capfd.readouterr().err
    assert (found, len(launcher.starts)) == (code, starts), output
    assert words.lower() in output.lower() and "Traceback" not in output
    assert not (tmp_path / "run" / ".stopped").exists()


def test_copies_in_memory_are_rescued_on_each_host_that_is_left(supervise, tmp_path, capfd):
    """After a start that has opened the run directory. What the host says that had all pieces is printed."""
    program = "import sys; open('{path}/{{host}}', 'a').write('x'); done = '{{host}}' == 'h2'; "
    program += "print('rescued step 7' if done else 'no step rescued'); sys.exit(0 if done else 3)"
    rescue = [sys.executable, "-c", program.format(path=tmp_path)]
    code, _ = supervise("exit(1)", "run(3); exit(1)", "run(4); exit(1)", DONE, dead=["h3"], rescue=rescue)
    assert code == 0 and summary(tmp_path)["lost_rescuing_s"] > 0
    assert {path.name: path.read_text() for path in tmp_path.glob("h?")} == {"h1": "xx", "h2": "xx"}
    lines = [line for line in capfd.readouterr().err.splitlines() if "rescued step" in line]
    assert lines == ["odc-mpi: rescued step 7"] * 2


def test_hosts_that_do_not_answer_or_fail_twice_stay_out(supervise, capfd):
    failing = "run(start); fail('h2.cluster'); exit(1)"
    code, launcher = supervise(failing, failing, "run(3); exit(1)", DONE, dead=["h3"])
    assert (code, launcher.starts) == (0, [["h1", "h2", "h3"], ["h1", "h2"], ["h1"], ["h1"]])
    lines = capfd.readouterr().err
    assert "; h3 does not answer. Restart 1 of at most 9, ranks: 4\n" in lines
    assert "; h2 failed 2 times. Restart 2 of at most 9, ranks: 2\n" in lines


def test_never_resuming_is_for_starts_before_the_run_has_begun(supervise, tmp_path):
    arguments = f"Path({str(tmp_path / 'arguments')!r}).open('a').write(' '.join(sys.argv[2:]) + '; ')"
    code, _ = supervise(f"{arguments}; exit(1)", f"{arguments}; run(1); exit(1)", f"{arguments}; {DONE}")
    assert code == 0 and (tmp_path / "arguments").read_text() == "1; 2; 3 resumed; "
    words = [*TRAIN, "--run.resume", "never", "--run.memory_every", "1", "--run.dir", "/r"]
    _, (first, resumed, rescue) = run._commands(["program", *words])
    assert first == ["program", *words] and resumed == [*first, "--run.resume", "auto"]
    assert rescue == ["program", "checkpoint", "rescue", "/r"]


def test_a_spare_host_replaces_a_lost_one(supervise):
    code, launcher = supervise("run(3); exit(1)", DONE, ranks=4, min_ranks=4, dead=["h1"])
    assert (code, launcher.starts) == (0, [["h1", "h2"], ["h2", "h3"]])


@pytest.mark.parametrize(("in_slurm", "code"), [(False, 1), (True, 75)])
def test_too_few_hosts_end_the_run_and_requeue_a_job(supervise, monkeypatch, capfd, in_slurm, code):
    if in_slurm:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "h1")
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    found, launcher = supervise("run(3); exit(1)", min_ranks=5, dead=["h3"])
    assert (found, len(launcher.starts)) == (code, 1)
    assert "; h3 does not answer. Not started again: --min-ranks 5, but the hosts have 4" in capfd.readouterr().err


def test_costs_are_in_the_summary_also_those_under_an_earlier_supervisor(supervise, tmp_path, capfd):
    again = "time.sleep(0.1); run(2, 10); time.sleep(0.1); run(8, 10); time.sleep(0.1); exit(75)"
    supervise("run(17); exit(1)", "time.sleep(0.1); run(5, 10); exit(1)", again)
    assert "odc-mpi: restarts 2, lost_steps 12, lost_noticing_s " in capfd.readouterr().err
    supervise("run(1, 18); close()")
    found = summary(tmp_path)
    assert (found["steps"], found["restarts"], found["lost_steps"]) == (9, 2, 7 + 5)
    assert found["lost_starting_s"] >= 0.2 and found["lost_redoing_s"] >= 0.1 and found["lost_noticing_s"] < 2
    (tmp_path / "run" / "restarts.json").unlink()  # as a run from scratch, which moves it away
    supervise(DONE)
    assert summary(tmp_path)["restarts"] == 0


def signal_when(is_so, *numbers, every_s=0.0):
    def send():
        while not is_so():
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(every_s)

    threading.Thread(target=send, daemon=True).start()


WAITS = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: ({on_signal}))
run(3)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_the_launcher_as_the_one_that_saves(supervise, tmp_path, number):
    signal_when(lambda: last_step(tmp_path / "run") == 3, number, number)
    code, launcher = supervise(WAITS.format(on_signal="close(), exit(75)"))
    assert (code, len(launcher.starts)) == (75, 1) and summary(tmp_path)["restarts"] == 0


def test_a_second_ctrl_c_ends_at_once(supervise, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "_REPEAT_S", 0.1)
    signal_when(lambda: last_step(tmp_path / "run") == 3, signal.SIGINT, signal.SIGINT, every_s=0.3)
    code, launcher = supervise(WAITS.format(on_signal=""))
    assert (code, len(launcher.starts)) == (128 + signal.SIGTERM, 1)
    assert "Press Ctrl-C again to end at once" in capfd.readouterr().err


def test_a_signal_between_starts_or_before_the_first_step_loses_nothing(supervise, monkeypatch, tmp_path):
    monkeypatch.setattr(supervisor, "answering", lambda _, hosts: (os.kill(os.getpid(), 15), hosts)[-1])
    code, launcher = supervise("run(3); exit(1)")
    assert (code, len(launcher.starts)) == (75, 1)
    signal_when((tmp_path / "up").exists, signal.SIGUSR1)
    code, _ = supervise(f"Path({str(tmp_path / 'up')!r}).touch(); time.sleep(60)")
    assert code == 75


def test_a_job_that_its_scheduler_ends_is_not_started_again(supervise, monkeypatch):
    monkeypatch.setattr(supervisor, "job_is_ending", lambda: True)
    code, launcher = supervise("run(3); exit(143)")
    assert (code, len(launcher.starts)) == (75, 1)


def test_one_supervisor_at_a_time(supervise, tmp_path):
    other = f"""
    import subprocess
    words = [sys.executable, "-m", "odc_mpi", "run", "--", *{TRAIN}, "--run.dir", str(directory)]
    found = subprocess.run(words, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.count("is in use by another odc-mpi run") == 1, found
    """
    assert supervise(textwrap.dedent(other) + DONE)[0] == 0
    assert not is_held(tmp_path / "run")


def test_ranks_are_placed_on_the_first_hosts():
    hosts = [Host("a", 4), Host("b", 2), Host("c", 4)]
    assert place_ranks(hosts, 5) == [Host("a", 4), Host("b", 1)]
    assert place_ranks(hosts, 99) == hosts
    assert is_same_host("node1", "node1.cluster") and not is_same_host("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("HYDRA build details", "-hosts a:2,b:1 -n 3"),
        ("mpiexec (Open MPI) 5.0.11", "--host a:2,b:1 --map-by slot:oversubscribe -x ODC_MPI_X -n 3"),
    ],
)
def test_hosts_on_the_command_line_of_both_libraries(tmp_path, monkeypatch, version, words):
    program = tmp_path / "mpiexec"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in [name for name in os.environ if name.startswith("ODC_MPI_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ODC_MPI_X", "1")
    hosts = [Host("a", 2), Host("b", 1)]
    assert Mpiexec(hosts).command(hosts) == [str(program), *words.split()]
    assert Mpiexec([Host("", 3)]).command([Host("", 3)]) == [str(program), "-n", "3"]
    monkeypatch.setenv("HYDRA_LAUNCHER_EXEC", "rsh -x")
    monkeypatch.chdir(tmp_path)
    assert Mpiexec(hosts).on_host(hosts[1], "a b", "c") == ["rsh", "-x", "b", f"cd {tmp_path} && 'a b' c"]
    assert Mpiexec(hosts).on_host(Host(socket.gethostname(), 1), "a b", "c") == ["a b", "c"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "2"], "expected -- and the training after the options"),
        (["train", "--config", "c"], "expected -- and the training"),
        (["--"], "expected -- and the training"),
        (["--", "tran"], "expected train after --, got tran"),
        (["--rank", "2", "--", *TRAIN], "unknown argument --rank"),
        (["--ranks", "0", "--", *TRAIN], "--ranks: expected an integer above 0"),
        (["--max-restarts", "-1", "--", *TRAIN], "--max-restarts"),
        (["--ranks", "2", "--min-ranks", "3", "--", *TRAIN], "--min-ranks: expected at most 2"),
        (["--hosts", "a,a", "--", *TRAIN], "expected different hosts"),
        (["--hosts", "a:0", "--", *TRAIN], "expected an integer above 0"),
        (["--hosts", "a:2,b", "--", *TRAIN], "--hosts: expected the ranks of each host"),
        (["--hosts", "a,b", "--ranks", "3", "--", *TRAIN], "--ranks as a multiple of 2"),
        (["--hosts", "a:2", "--ranks", "3", "--", *TRAIN], "--ranks: expected at most 2"),
        (["--hosts", "b.invalid,a.invalid", "--", *TRAIN], "got no answer from a.invalid, b.invalid"),
        (["--", *TRAIN, "--dry-run"], "without odc-mpi run"),
        (["--", *TRAIN, "--run.steps", "many"], "run.steps"),
        (["--", "train", "--config", "/dev/stdin"], "expected a regular file"),
        (["--", *TRAIN, "--run.dir", "/dev/null/run"], "run.dir: expected a directory to write in"),
    ],
)
def test_user_errors(arguments, words, capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert cli.main(["run", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("odc-mpi: error: ") and words in line


def test_a_missing_launcher_and_one_too_many(capsys, monkeypatch, tmp_path):
    for name in ("SLURM_JOB_NODELIST", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert cli.main(["run", "--", *TRAIN]) == 2
    assert "no mpiexec beside this Python or on the PATH" in capsys.readouterr().err
    monkeypatch.setenv("PMI_RANK", "0")
    assert cli.main(["run", "--", *TRAIN]) == 2
    assert "run it without mpiexec" in capsys.readouterr().err
