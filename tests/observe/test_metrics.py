"""What a run tells: spans, lines of JSON, progress with and without a terminal, the summary."""

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from odc_mpi.errors import UserError
from odc_mpi.observe.metrics import (
    MetricsWriter,
    ProgressReporter,
    StepMetrics,
    Summary,
    closing_table,
    make_console,
    terminal_width,
    write_summary,
)

STEP = StepMetrics(
    step=1,
    loss=8.25,
    grad_norm=1.5,
    learning_rate=3e-4,
    num_tokens=900,
    num_input_tokens=1000,
    step_s=0.5,
    tokens_per_s=2000.0,
    idle_fraction=0.25,
    microbatches_min=2,
    microbatches_max=5,
    slowest_rank=3,
    skipped=False,
    fetch_wait_s=0.01,
    accumulate_wait_s=0.02,
    boundary_wait_s=0.03,
)
SKIPPED = replace(STEP, loss=float("nan"), grad_norm=float("inf"), skipped=True)
FACTS = {
    "world_size": 4,
    "transport": "window",
    "reduction": "accumulate",
    "balance": "lb_mini",
    "zero_copy": False,
    "progress": "off",
    "peak_parameter_bytes": 3 * 2**20,
    "collectives_per_minibatch": 3,
    "mpi_library": "MPICH Version:      5.0\nMPICH Release date: ...",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("ODC_MPI_PROGRESS", "FORCE_COLOR", "NO_COLOR", "COLUMNS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def no_constant(name: str):
    raise AssertionError(f"{name} is not JSON")


def strict_json(text: str):
    return json.loads(text, parse_constant=no_constant)


class TestMetricsWriter:
    def test_every_line_is_there_at_once_and_is_json(self, tmp_path):
        path = tmp_path / "new" / "run" / "metrics.jsonl"
        with MetricsWriter(path.parent) as writer:
            writer.write(STEP)
            assert strict_json(path.read_text()) == asdict(STEP)
            writer.write(SKIPPED)
            second = strict_json(path.read_text().splitlines()[1])
        assert second == {**asdict(SKIPPED), "loss": None, "grad_norm": None}

    def test_closing_twice_is_harmless_and_reopening_appends(self, tmp_path):
        for _ in range(2):
            writer = MetricsWriter(tmp_path)
            writer.write(STEP)
            writer.close()
            writer.close()
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2

    def test_a_run_directory_that_cannot_be_is_the_users_mistake(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match=r"^run\.dir: expected a directory to write in, got .*file/run: Not a dir"):
            MetricsWriter(tmp_path / "file" / "run")

    def test_a_full_disk_is_told_once_and_leaves_whole_lines(self, tmp_path, capsys):
        # A process of its own: the limit would hold for the whole test run.
        script = (
            "import resource, signal, sys\n"
            "from dataclasses import replace\n"
            "from pathlib import Path\n"
            "from test_metrics import STEP\n"
            "from odc_mpi.observe.metrics import MetricsWriter\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "with MetricsWriter(Path(sys.argv[1])) as writer:\n"
            "    writer.write(STEP)\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))\n"
            "    writer.write(replace(STEP, step=2))\n"
            "    writer.write(replace(STEP, step=3))\n"
            "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
            "    writer.write(replace(STEP, step=4))\n"
        )
        environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("WARNING: cannot write") == 1
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [strict_json(line)["step"] for line in lines] == [STEP.step, 4]


class TestSummary:
    def test_totals_over_steps(self):
        summary = Summary()
        summary.add(SKIPPED)
        summary.add(STEP)
        summary.add(replace(STEP, loss=7.0))
        summary.add(replace(STEP, loss=6.0, step_s=1.5, idle_fraction=0.75, fetch_wait_s=0.07))
        summary.add(SKIPPED)
        result = summary.finish({**FACTS, "extra": 1})
        assert {name: result[name] for name in FACTS} == FACTS and result["extra"] == 1
        assert (result["steps"], result["skipped_steps"], result["tokens"]) == (5, 2, 5000)
        assert (result["loss_first"], result["loss_last"]) == (8.25, 6.0)
        assert result["tokens_per_s"] == pytest.approx(5000 / 3.5)
        assert result["idle_fraction"] == pytest.approx((4 * 0.5 * 0.25 + 1.5 * 0.75) / 3.5)
        assert result["fetch_wait_s"] == pytest.approx(0.11)
        assert result["accumulate_wait_s"] == pytest.approx(0.10)
        assert result["boundary_wait_s"] == pytest.approx(0.15)
        assert 0 <= result["elapsed_s"] < 5

    def test_one_step_is_first_and_last(self):
        summary = Summary()
        summary.add(STEP)
        assert {summary.finish(FACTS)[name] for name in ("loss_first", "loss_last")} == {8.25}

    def test_no_steps_are_no_error(self):
        result = Summary().finish(FACTS)
        assert (result["steps"], result["loss_first"], result["tokens_per_s"]) == (0, None, 0.0)

    @pytest.mark.parametrize("name", FACTS)
    def test_every_promised_fact_is_asked_for(self, name):
        with pytest.raises(KeyError, match=name):
            Summary().finish({key: value for key, value in FACTS.items() if key != name})

    def test_written_whole_or_not_at_all(self, tmp_path):
        write_summary(tmp_path, {"loss_last": float("nan"), "deep": [{"x": float("inf")}, 1.5]})
        expected = {"loss_last": None, "deep": [{"x": None}, 1.5]}
        assert strict_json((tmp_path / "summary.json").read_text()) == expected
        with pytest.raises(TypeError):
            write_summary(tmp_path, {"good": 1, "bad": object()})
        assert strict_json((tmp_path / "summary.json").read_text()) == expected
        write_summary(tmp_path, {"new": 1})
        assert strict_json((tmp_path / "summary.json").read_text()) == {"new": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


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
        return ProgressReporter(total_steps, Console(file=file, force_terminal=False, width=70)), file

    def test_a_header_and_aligned_lines_flushed_at_once(self):
        reporter, file = self.reporter(100)
        for step in (replace(STEP, step=9), replace(STEP, step=100, grad_norm=None, tokens_per_s=1234567.0)):
            reporter.report(step)
            assert file.flushed == file.getvalue()
            assert file.flushed.count("\n") == (2 if step.step == 9 else 3)
        header, first, second = file.getvalue().splitlines()
        assert header.split() == ["step", "loss", "grad", "norm", "lr", "tokens/s", "idle", "micro", "slowest"]
        assert first.split() == ["9/100", "8.2500", "1.5", "3.00e-04", "2,000", "25.0%", "2-5", "rank", "3"]
        assert second.split()[2:5] == ["-", "3.00e-04", "1,234,567"]
        assert len(header) == len(first) == len(second) <= 80
        assert first.index("8.2500") == second.index("8.2500") and first.index("25.0%") == second.index("25.0%")

    def test_skipped_steps_are_marked(self):
        reporter, file = self.reporter(10)
        reporter.report(SKIPPED)
        assert file.getvalue().splitlines()[1].split("  ")[-1] == "skipped: non-finite gradient"
        assert "nan" in file.getvalue()

    def test_nothing_but_printable_ascii_and_no_more_than_100_columns(self):
        reporter, file = self.reporter(1_000_000)
        with reporter:
            reporter.report(replace(STEP, step=1_000_000, slowest_rank=1023, microbatches_max=100))
            reporter.report(SKIPPED)
            reporter.finish({**Summary().finish(FACTS), "run_dir": "runs/x"})
        lines = file.getvalue().splitlines()
        assert all(line.isascii() and line.isprintable() and len(line) <= 100 for line in lines)


class TestProgressOnATerminal:
    def test_lines_scroll_above_a_bar_that_close_takes_away(self):
        file = FlushCountingFile()
        stdout = sys.stdout
        with ProgressReporter(4, Console(file=file, force_terminal=True, width=90)) as reporter:
            reporter.report(STEP)
            reporter.report(replace(SKIPPED, step=2))
            assert file.flushed == file.getvalue()
            assert "2/4" in file.getvalue().splitlines()[-1] and "left" in file.getvalue().splitlines()[-1]
            assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")  # the cursor stays visible
        assert file.getvalue().endswith("\n\x1b[?25h") and sys.stdout is stdout
        reporter.close()
        written = file.getvalue()
        reporter.report(replace(STEP, step=3))
        assert (
            file.getvalue().removeprefix(written).split()[0] == "3/4" and "left" not in file.getvalue()[len(written) :]
        )

    def test_an_error_finds_the_bar_gone(self):
        stdout = sys.stdout
        console = Console(file=io.StringIO(), force_terminal=True, width=90)
        with pytest.raises(RuntimeError), ProgressReporter(4, console):
            assert sys.stdout is not stdout
            raise RuntimeError
        assert sys.stdout is stdout


class TestClosingTable:
    def render(self, summary) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(closing_table(summary))
        return " ".join(console.file.getvalue().split())

    def test_it_tells_the_run(self):
        summary = Summary()
        summary.add(STEP)
        summary.add(replace(STEP, loss=7.0))
        text = self.render({**summary.finish(FACTS), "run_dir": "runs/[bold]x"})
        for part in (
            *("steps 2 (0 skipped)", "loss first -> last 8.2500 -> 7.0000", "tokens 2,000, 2,000 per second"),
            *("idle at boundaries 25.0%", "boundary wait 0.02 s, 0.04 s, 0.06 s", "parameter memory 3.0 MiB"),
            *("collectives per minibatch 3", "MPI library MPICH Version: 5.0 run", "run directory runs/[bold]x"),
        ):
            assert part in text

    def test_what_is_missing_shows_as_a_dash(self):
        text = self.render({})
        assert "loss first -> last - -> -" in text and "run directory -" in text


SHOW_WIDTH = "from odc_mpi.observe.metrics import terminal_width; open('width', 'w').write(str(terminal_width()))"


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

    def test_behind_the_pipe_of_mpiexec(self, tmp_path, terminal):
        assert self.width(tmp_path, '"$@" | cat', terminal) == "123"

    def test_not_where_the_output_of_mpiexec_is_piped(self, tmp_path):
        assert self.width(tmp_path, '"$@" | cat', subprocess.PIPE) == "None"

    def test_not_the_pseudo_terminal_that_mpiexec_made(self, tmp_path, terminal):
        script = f'"$@" > {os.ttyname(terminal)} &\nwait $!'
        assert self.width(tmp_path, script, subprocess.PIPE) == "None"
        assert self.width(tmp_path, script, subprocess.PIPE, name="other") == "123"

    def test_not_behind_any_other_pipe(self, tmp_path, terminal):
        assert self.width(tmp_path, '"$@" | cat', terminal, name="other") == "None"


class TestConsole:
    @pytest.fixture(autouse=True)
    def no_terminal(self, monkeypatch):
        monkeypatch.setattr("odc_mpi.observe.metrics._columns", lambda launcher: None)

    @pytest.fixture
    def has_terminal(self, monkeypatch, no_terminal):
        monkeypatch.setattr("odc_mpi.observe.metrics._columns", lambda launcher: 77)

    def test_plain_without_a_terminal(self):
        console = make_console()
        assert (console.is_terminal, console.color_system, console.width) == (False, None, 100)

    def test_bar_on_a_terminal(self, has_terminal):
        console = make_console()
        assert (console.is_terminal, console.color_system, console.width) == (True, "256", 77)

    def test_colours_without_a_bar(self, monkeypatch):
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert (make_console().is_terminal, make_console().color_system) == (False, "standard")

    def test_the_wish_wins(self, monkeypatch):
        monkeypatch.setenv("ODC_MPI_PROGRESS", "bar")
        monkeypatch.setenv("COLUMNS", "66")
        assert terminal_width() == 66

    def test_the_wish_for_plain_lines_wins_too(self, monkeypatch, has_terminal):
        monkeypatch.setenv("ODC_MPI_PROGRESS", "plain")
        assert terminal_width() is None

    @pytest.mark.parametrize("term", ["dumb", None])
    def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(self, monkeypatch, has_terminal, term):
        monkeypatch.setenv("TERM", term) if term else monkeypatch.delenv("TERM")
        assert terminal_width() is None

    def test_any_other_wish_is_a_mistake(self, monkeypatch):
        monkeypatch.setenv("ODC_MPI_PROGRESS", "fancy")
        with pytest.raises(UserError, match="ODC_MPI_PROGRESS: expected bar or plain, got 'fancy'"):
            terminal_width()
