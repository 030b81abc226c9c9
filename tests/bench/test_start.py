"""Predictions and checks of `bench start`, with runs whose files are written here."""

import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from odc_mpi.bench.start import COMMUNICATING, MANY_RANKS, measure
from odc_mpi.errors import UserError
from odc_mpi.report.bench_report import describe
from odc_mpi.report.page import terminal
from odc_mpi.runtime.start.start_times import PHASES, StartTimes, process_start


def printed(result):
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(terminal(describe(result)))
    return capture.get()


def train_with(seconds, loss=lambda ranks: 2.5, code=0):
    """A training whose phases take `seconds(phase, ranks)`."""

    def train(ranks, words):
        run = Path(words[words.index("--run.dir") + 1])
        run.mkdir()
        phases = {phase: seconds(phase, ranks) for phase in PHASES}
        (run / "summary.json").write_text(json.dumps({"start_s": phases | {"total": sum(phases.values())}}))
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss(ranks), "peak_host_bytes": 300 << 20}))
        return code

    return train


def test_only_phases_that_communicate_grow_with_the_ranks_of_the_prediction(monkeypatch):
    """On two cores, 4 ranks take turns: their seconds count half."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    lines, configs = [], []

    def train(ranks, words):
        configs.append(words[words.index("--config") + 1])
        return train_with(lambda phase, ranks: (phase != "evaluation") * (0.5 + 0.25 * ranks) * ranks / 2)(ranks, words)

    result = measure(train, None, [2, 4, 8], [3, 5], lines.append)
    assert [(start["ranks"], start["units"]) for start in result["starts"]] == [
        (n, u) for u in (3, 5) for n in (2, 4, 8)
    ]
    assert len(set(configs)) == 2 and len(lines) == 6 and "8 ranks, 5 units" in lines[-1]
    predicted = result["predicted_s"]
    for phase in set(PHASES) - {"evaluation"}:
        expected = 0.5 + 0.25 * MANY_RANKS if phase in COMMUNICATING else 0.5 + 0.25 * 4
        assert predicted[phase] == pytest.approx(expected), phase
    assert predicted["total"] == pytest.approx(sum(predicted[phase] for phase in PHASES))
    text = printed(result)
    assert "8 ranks on 2 cores finish" in text and f"{MANY_RANKS:,}*" in text and "not measured" in text


def test_one_number_of_ranks_gives_no_prediction():
    result = measure(train_with(lambda phase, ranks: 1.0), Path("config.yaml"), [2], [3], lambda line: None)
    assert result["predicted_s"] is None and result["starts"][0]["units"] is None
    assert "predicted" not in printed(result)


def test_other_losses_and_failed_runs_are_errors():
    other = train_with(lambda phase, ranks: 1.0, loss=lambda ranks: 2.5 + 1e-3 * (ranks == 4))
    with pytest.raises(
        UserError, match=r"losses of the run on 2 ranks, got 2\.501 instead of 2\.5 in step 1 on 4 ranks"
    ):
        measure(other, Path("config.yaml"), [2, 4], [3], lambda line: None)
    with pytest.raises(UserError, match="on 2 ranks ended with exit code 2"):
        measure(train_with(lambda phase, ranks: 1.0, code=2), Path("config.yaml"), [2], [3], lambda line: None)


def test_phases_and_their_parts_add_up_to_the_time_since_the_start():
    began = process_start()
    assert 0 < time.perf_counter() - began < time.process_time() + 24 * 3600
    times = StartTimes(began)
    times.end("imports")
    time.sleep(0.05)
    times.end("other", windows=0.02, weights=0.01)
    assert (times.seconds["windows"], times.seconds["weights"]) == (0.02, 0.01)
    assert times.seconds["other"] >= 0.02
    assert sum(times.seconds.values()) == pytest.approx(time.perf_counter() - began, abs=0.1)
