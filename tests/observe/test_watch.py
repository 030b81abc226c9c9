"""Following a run from its files: after its end, while it runs, after it was killed, and one that never starts."""

import json
import os
import re
import socket
import threading
import time

import pytest
from declared_metrics import GRPO, SFT
from step_metrics import STEP

from odc_mpi.cli import main as cli
from odc_mpi.observe import watch
from odc_mpi.observe.metrics import write_declarations
from odc_mpi.training.rundir.run_dir_lock import RunDirectoryLock


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_POLL_S", 0.05)
    monkeypatch.setenv("ODC_MPI_PROGRESS", "plain")
    (tmp_path / "metrics.jsonl").write_text(lines(0, 1, 2))
    (tmp_path / "config.yaml").write_text("run:\n  steps: 4\n")
    write_declarations(tmp_path, SFT)
    return tmp_path


def lines(*numbers):
    times = {n: f"2026-01-01T00:00:{10 * n:02}+00:00" for n in numbers}
    made = [STEP | {"step": n, "time": times[n], "step_s": 10.0, "loss": 9.0 - n} for n in numbers if n]
    start = [{"step": 0, "time": times[0], "eval_loss": 9.5}] if 0 in numbers else []
    return "".join(json.dumps(line) + "\n" for line in (*start, *made))


def test_a_run_that_has_ended(run, capsys):
    (run / "summary.json").write_text(json.dumps({"steps": 2, "loss_first": 8.0, "loss_last": 7.0}))
    assert cli.main(["watch", str(run)]) == 0
    header, start, first, second, *rest = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "loss", "held-out", "tokens/s", "idle", "left"]
    assert start.split() == ["0/4", "9.5000"]
    assert first.split() == ["1/4", "8.0000", "2,000", "25.0%", "0:00:30"] and second.split()[-1] == "0:00:20"
    assert "8.0000 -> 7.0000" in "".join(rest)


def test_rewards(run, capsys):
    write_declarations(run, GRPO)
    made = [{"step": 0, "time": "2026-01-01T00:00:00+00:00", "eval_reward": 0.125}]
    made += [json.loads(line) | {"reward": 0.5, "completions/mean_length": 20.0} for line in lines(1).splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    assert cli.main(["watch", str(run)]) == 0
    header, start, first, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "reward", "held-out", "length", "tokens/s", "idle", "left"]
    assert start.split() == ["0/4", "0.1250"] and first.split()[:3] == ["1/4", "0.5000", "20.0"]


def test_a_run_that_goes_on_and_ends(run, capsys):
    locked = threading.Event()

    def go_on():
        with RunDirectoryLock(run, 1):
            locked.set()
            time.sleep(0.3)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(lines(3, 4))

    thread = threading.Thread(target=go_on)
    thread.start()
    locked.wait(10)
    assert cli.main(["watch", str(run)]) == 0
    thread.join()
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == ["0/4", "1/4", "2/4", "3/4", "4/4", "the"]


def test_a_terminal(run, capsys, monkeypatch):
    """One block, which is drawn again in the same place."""
    monkeypatch.setenv("ODC_MPI_PROGRESS", "bar")
    monkeypatch.setenv("TERM", "xterm")
    grows = iter([(3,), (4,), ()])

    def is_running():
        new = next(grows)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines(*new))
        return bool(new)

    watch.watch(run, is_running, 1)
    first, *_, last = re.split(r"(?:\x1b\[1A|\x1b\[2K)+", re.sub(r"\x1b\[\?25.", "", capsys.readouterr().out))
    cells = [line.split() for line in last.splitlines()]
    assert first.split()[:2] == ["step", "3/4"]
    assert cells[0][:2] == ["step", "4/4"] and cells[0][3:] == ["0:00:00", "left"]
    assert cells[1] == ["loss", "5.0000", "█▆▃▁", "5.0000", "to", "8.0000"]
    assert cells[2][:2] == ["held-out", "9.5000"] and cells[4][:2] == ["idle", "25.0%"]


def test_a_run_that_was_killed(run, capsys):
    """Its file is left, also with the number of a process that another program has now."""
    (run / "owner.json").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    assert cli.main(["watch", str(run)]) == 0
    assert "the run ended after step 2 of 4, without a summary" in capsys.readouterr().out


def test_a_run_that_never_starts(run, capsys):
    (run / "config.yaml").unlink()
    assert cli.main(["watch", str(run), "--wait", "0.2"]) == 2
    assert [line.count("0.2 s (--wait)") for line in capsys.readouterr().err.splitlines()] == [1, 1]
