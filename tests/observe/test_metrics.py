"""Records of a run: lines of JSON, and the summary."""

import json
import os
import subprocess
import sys

import pytest
from declared_metrics import PLAIN, SFT
from step_metrics import STEP
from user_errors import refused

from odc_mpi.observe.metrics import METRICS, MetricsWriter, Summary, read_metrics, write_summary

SKIPPED = STEP | {"loss": float("nan"), "grad_norm": float("inf"), "skipped": True}
RUN_INFO = {"world_size": 4, "transport": "window", "reduction": "accumulate", "balance": "lb_mini", "zero_copy": False}
RUN_INFO |= {"progress": "off", "peak_parameter_bytes": 3 * 2**20, "collectives_per_minibatch": 3}
RUN_INFO |= {"mpi_library": "MPICH 5.0"}


@pytest.mark.parametrize("damage", [{"skipped": "x"}, {"step_s": None}, {"step": float("inf")}, {"step": []}], ids=str)
def test_damaged_lines_are_not_read(tmp_path, damage):
    """A resumed run keeps the lines before, and its summary adds them."""
    start = {"step": 0, "eval_loss": 9.0, "loss": 100.0}  # the evaluation before the first step
    lines = [start, STEP, STEP | {"step": 2, "loss": "x"}, STEP | {"step": 3} | damage, {"step": 4}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_metrics(tmp_path, 4)
    assert read == lines[:3]
    summary = Summary(SFT, read).finish({})
    assert (summary["steps"], summary["loss_first"], summary["eval_loss_start"]) == (2, 8.25, 9.0)


def strict_json(text: str):
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


class TestMetricsWriter:
    def test_every_line_is_there_at_once_and_is_json(self, tmp_path):
        path = tmp_path / "new" / "run" / "metrics.jsonl"
        with MetricsWriter(path.parent) as writer:
            writer.write(STEP)
            assert strict_json(path.read_text()) == STEP
            writer.write(SKIPPED)
            second = strict_json(path.read_text().splitlines()[1])
        assert second == SKIPPED | {"loss": None, "grad_norm": None}

    def test_an_impossible_run_directory_is_a_user_error(self, tmp_path):
        (tmp_path / "file").touch()
        refused("run.dir: expected a directory...file/run: Not a", MetricsWriter, tmp_path / "file" / "run")

    def test_a_full_disk_is_reported_once_and_leaves_complete_lines(self, tmp_path, capsys):
        # A process of its own: the limit would hold for the whole test run.
        script = (
            "import resource, signal, sys; from pathlib import Path; from step_metrics import STEP\n"
            "from odc_mpi.observe.metrics import MetricsWriter\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "with MetricsWriter(Path(sys.argv[1])) as writer:\n"
            "    for step, limit in ((1, -1), (2, 500), (3, 500), (4, -1)):\n"
            "        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))\n"
            "        writer.write(STEP | {'step': step})\n"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script, str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("WARNING: cannot write") == 1
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [strict_json(line)["step"] for line in lines] == [1, 4]


class TestSummary:
    def test_totals_over_steps(self):
        summary = Summary(PLAIN)
        summary.add(SKIPPED)
        summary.add(STEP)
        summary.add(STEP | {"loss": 7.0})
        last = {"loss": 6.0, "step_s": 1.5, "tokens_per_s": 1000 / 1.5, "idle_fraction": 0.75, "fetch_wait_s": 0.07}
        summary.add(STEP | last)
        summary.add(SKIPPED)
        result = summary.finish({**RUN_INFO, "extra": 1})
        assert {name: result[name] for name in RUN_INFO} == RUN_INFO and result["extra"] == 1
        assert (result["steps"], result["skipped_steps"], result["tokens"]) == (5, 2, 5000)
        assert (result["loss_first"], result["loss_last"]) == (8.25, 6.0)
        assert result["tokens_per_s"] == pytest.approx(5000 / 3.5)
        assert result["idle_fraction"] == pytest.approx((4 * 0.5 * 0.25 + 1.5 * 0.75) / 3.5)
        waits = [result[f"{kind}_wait_s"] for kind in ("fetch", "accumulate", "boundary")]
        assert waits == pytest.approx([0.11, 0.10, 0.15])
        assert 0 <= result["elapsed_s"] < 5
        result = Summary(PLAIN).finish(RUN_INFO)
        assert (result["steps"], result["loss_first"], result["tokens_per_s"]) == (0, None, 0.0)

    def test_it_shows_all_of_a_resumed_run(self):
        """Of sums that are measured better than step by step, the steps before this start have none but theirs."""
        null = STEP | {"loss": None, "skipped": True}
        summary = Summary(PLAIN, [null, STEP, {"step": 3, "step_s": 0.5, "skipped": False, "reward": 1.0}])
        summary.add(STEP | {"loss": 7.0})
        result = summary.finish({**RUN_INFO, "fetch_wait_s": 4.0})
        assert (result["steps"], result["skipped_steps"], result["tokens"]) == (4, 1, 3000)
        assert (result["loss_first"], result["loss_last"]) == (8.25, 7.0)
        assert result["fetch_wait_s"] == pytest.approx(4.02) and result["accumulate_wait_s"] == pytest.approx(0.06)
        assert 1.5 <= result["elapsed_s"] < 6.5

    def test_written_atomically(self, tmp_path):
        write_summary(tmp_path, {"loss_last": float("nan"), "deep": [{"x": float("inf")}, 1.5]})
        expected = {"loss_last": None, "deep": [{"x": None}, 1.5]}
        assert strict_json((tmp_path / "summary.json").read_text()) == expected
        assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
