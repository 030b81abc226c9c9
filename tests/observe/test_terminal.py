"""Output of a run, with and without a terminal."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from declared_metrics import GRPO, PLAIN, SFT
from rich.console import Console
from step_metrics import STEP
from test_metrics import RUN_INFO, SKIPPED
from user_errors import refused

from odc_mpi.observe.metrics import Summary
from odc_mpi.observe.terminal import ProgressReporter, closing_table, make_console, terminal_width


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("ODC_MPI_PROGRESS", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


class FlushCountingFile(io.StringIO):
    """Keeps what had been written at each flush."""

    def __init__(self):
        super().__init__()
        self.flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


class TestProgressWithoutATerminal:
    def reporter(self, total_steps: int):
        file = FlushCountingFile()
        return ProgressReporter(total_steps, PLAIN, Console(file=file, force_terminal=False, width=80)), file

    def test_a_header_and_aligned_lines_flushed_at_once(self):
        reporter, file = self.reporter(100)
        usual = STEP | {"epoch": 0.5}
        for step in (usual | {"step": 9}, usual | {"step": 100, "grad_norm": None, "tokens_per_s": 1234567.0}):
            reporter.report(step)
            assert file.flushed == file.getvalue()
            assert file.flushed.count("\n") == (2 if step["step"] == 9 else 3)
        header, first, second = file.getvalue().splitlines()
        assert header.split()[-7:] == ["lr", "tokens/s", "idle", "micro", "slowest", "epoch", "left"]
        assert first.split() == ["9/100", "8.2500", "1.5", "3.00e-04", "2,000", "25.0%", "2-5", "rank", "3", "0.50"]
        assert second.split()[2:5] == ["-", "3.00e-04", "1,234,567"]

    def test_the_evaluation_before_the_first_step_and_the_time_left(self):
        file = FlushCountingFile()
        reporter = ProgressReporter(10, SFT, Console(file=file, force_terminal=False, width=80))
        reporter.report({"step": 0, "eval_loss": 8.5, "time": "2026-01-01T00:00:00+00:00"})
        reporter.report(STEP | {"time": "2026-01-01T00:01:00+00:00", "step_s": 2.0})
        reporter.report(STEP | {"step": 2, "eval_loss": 8.0, "time": "2026-01-01T02:00:58+00:00"})
        _, start, first, second = file.getvalue().splitlines()
        assert start.split() == ["0/10", "8.5000"]
        assert first.split()[-1] == "0:00:18" and second.split()[-2:] == ["8.0000", "8:00:00"]

    def test_nothing_but_printable_ascii_and_no_more_than_100_columns(self):
        reporter, file = self.reporter(1_000_000)
        with reporter:
            reporter.report(STEP | {"step": 1_000_000, "slowest_rank": 1023, "microbatches_max": 100})
            reporter.report(SKIPPED)
            reporter.finish({**Summary(PLAIN).finish(RUN_INFO), "run_dir": "runs/x"})
        lines = file.getvalue().splitlines()
        assert all(line.isascii() and line.isprintable() and len(line) <= 100 for line in lines)
        assert "nan" in lines[2] and lines[2].split("  ")[-1] == "skipped: non-finite gradient"


class TestProgressOnATerminal:
    def test_lines_scroll_above_a_bar_that_close_takes_away(self):
        file = FlushCountingFile()
        stdout = sys.stdout
        with ProgressReporter(4, PLAIN, Console(file=file, force_terminal=True, width=90)) as reporter:
            reporter.report(STEP)
            reporter.report(SKIPPED | {"step": 2})
            assert file.flushed == file.getvalue()
            assert "2/4" in file.getvalue().splitlines()[-1] and "left" in file.getvalue().splitlines()[-1]
            assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")  # the cursor stays visible
        assert file.getvalue().endswith("\n\x1b[?25h") and sys.stdout is stdout
        reporter.close()
        written = file.getvalue()
        reporter.report(STEP | {"step": 3})
        later = file.getvalue().removeprefix(written)
        assert later.split()[0] == "3/4" and "left" not in later


class TestClosingTable:
    def render(self, summary, metrics=PLAIN) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(closing_table(summary, metrics))
        return " ".join(console.file.getvalue().split())

    def test_it_prints_the_run(self):
        summary = Summary(PLAIN)
        summary.add(STEP)
        summary.add(STEP | {"loss": 7.0})
        text = self.render({**summary.finish(RUN_INFO), "run_dir": "runs/[bold]x"})
        parts = (
            *("steps 2 (0 skipped)", "8.2500 -> 7.0000", "2,000, 2,000 per second", "25.0%", "3.0 MiB", "fetch 0.02 s"),
        )
        parts += ("push 0.04 s", "step end 0.06 s", "minibatch 3", "MPICH 5.0", "run directory runs/[bold]x")
        assert [part for part in parts if part not in text] == []

    def test_it_reports_an_evaluation(self):
        figures = {"eval_loss_start": 8.0, "eval_loss": 2.0, "eval_perplexity": 7.389}
        assert "eval loss (start -> final) 8.0000 -> 2.0000, perplexity 7.389" in self.render(figures, SFT)
        assert not self.render({}, SFT)

    def test_a_run_with_rewards_has_no_loss(self):
        summary = {"reward_first": 0.125, "reward_last": 0.5, "loss_last": 1.0, "eval_exact_match": 0.25}
        text = self.render(summary, GRPO)
        assert "reward (first -> last) 0.1250 -> 0.5000" in text and "eval match (start -> final) - -> 25.0%" in text
        assert "loss" not in text


SHOW_WIDTH = "from odc_mpi.observe.terminal import terminal_width; open('width', 'w').write(str(terminal_width()))"


class TestWhereTheTerminalIs:
    """A stand-in named mpiexec forwards as MPICH does (a pipe) or claims what Open MPI does (a pseudo-terminal)."""

    @pytest.fixture
    def terminal(self):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 123, 0, 0))
        yield theirs
        os.close(ours)
        os.close(theirs)

    def width(self, tmp_path: Path, script: str, stdout, name: str = "mpiexec") -> str:
        launcher = tmp_path / name
        launcher.write_text(f"#!/bin/sh\n{script}\n")
        launcher.chmod(0o755)
        command = [launcher, sys.executable, "-c", SHOW_WIDTH]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, stdout=stdout, cwd=tmp_path, env=env, check=True, timeout=60)
        return (tmp_path / "width").read_text()

    def test_it_is_behind_the_pipe_of_mpiexec(self, tmp_path, terminal):
        """Not where the output of mpiexec is piped, nor the pseudo-terminal that mpiexec made."""
        assert self.width(tmp_path, '"$@" | cat', terminal) == "123"
        assert self.width(tmp_path, '"$@" | cat', subprocess.PIPE) == "None"
        script = f'"$@" > {os.ttyname(terminal)} &\nwait $!'
        assert self.width(tmp_path, script, subprocess.PIPE) == "None"
        assert self.width(tmp_path, script, subprocess.PIPE, name="other") == "123"


@pytest.mark.parametrize(
    ("columns", "environment", "width"),
    [
        (None, {}, None),
        (77, {}, 77),
        (None, {"ODC_MPI_PROGRESS": "bar", "COLUMNS": "66"}, 66),
        (77, {"ODC_MPI_PROGRESS": "plain"}, None),
        (77, {"TERM": "dumb"}, None),  # it cannot move its cursor
        (77, {"TERM": None}, None),
        (None, {"ODC_MPI_PROGRESS": "fancy"}, "ODC_MPI_PROGRESS: expected bar or plain, got 'fancy'"),
    ],
)
def test_the_console_is_what_the_terminal_can_show_and_settings_ask_for(monkeypatch, columns, environment, width):
    monkeypatch.setattr("odc_mpi.observe.terminal._columns", lambda launcher: columns)
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    if isinstance(width, str):
        refused(width, terminal_width)
        return
    assert terminal_width() == width
    if not environment:
        made = make_console()
        expected = (True, "256", width) if width else (False, None, 100)
        assert (made.is_terminal, made.color_system, made.width) == expected
