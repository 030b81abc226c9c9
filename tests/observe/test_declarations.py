"""A metric is declared once, by its callback: it then appears everywhere, also in another process."""

import json

import pytest
from step_metrics import STEP
from user_errors import refused

from odc_mpi.cli import main as cli
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.log import RunLogger
from odc_mpi.observe.metrics import RESULT, Metric, read_declarations
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.recipes.sft.objective import SFTObjective
from odc_mpi.training.update import Update

TEMPERATURE = Metric("heat", "temperature", RESULT, "first last", "{:.1f} K", ("heat", 7), "heat", "watch tile")


class Thermometer(Callback):
    metrics = (TEMPERATURE,)

    def on_step_end(self, step):
        step.metrics["heat"] = 290.0 + step.number


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A run of two steps with a callback that no module of the package knows."""
    monkeypatch.setenv("ODC_MPI_PROGRESS", "plain")
    (tmp_path / "config.yaml").write_text("run:\n  steps: 2\n")
    thermometer = Thermometer()
    logger = RunLogger(tmp_path, 2, "", [SFTObjective, Update, thermometer], writes=True)
    for number in (1, 2):
        step = Step(number, None, STEP | {"step": number, "time": f"2026-01-01T00:00:0{number}+00:00"})
        thermometer.on_step_end(step)
        logger.on_step_end(step)
    logger.print_summary(logger.summarize({}))
    logger.close()
    return tmp_path, capsys.readouterr().out


def outputs(run, capsys):
    """Return the output of `odc-mpi watch`, and the report's page."""
    assert cli.main(["watch", str(run)]) == 0
    watched = capsys.readouterr().out
    assert cli.main(["report", str(run)]) == 0
    return watched, (run / "report.html").read_text()


def test_a_new_metric_is_shown_everywhere(run, capsys):
    run, printed = run
    watched, page = outputs(run, capsys)
    for text in (printed, watched):
        header, first, second, *table = text.strip().splitlines()
        column = header.index("heat") + len("heat")
        assert [line[:column].split()[-2:] for line in (first, second)] == [["291.0", "K"], ["292.0", "K"]]
        assert "heat (first -> last) 291.0 K -> 292.0 K" in " ".join(" ".join(table).split())
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["heat_first"], summary["heat_last"]) == (291.0, 292.0)
    assert TEMPERATURE in read_declarations(run)
    assert ">temperature</span><b>291 \u2192 292</b>" in page
    assert ">temperature of the first step</th>" in page and ">temperature of the last step</th>" in page


@pytest.mark.parametrize(
    "content", [None, "[{", "[]", "17", '[{"key": "loss"}]', '[{"key": "a", "label": "", "summary": "x"}]']
)
def test_an_older_or_damaged_run_is_shown_with_keys(run, capsys, content):
    run, _ = run
    (run / "metrics.json").unlink()
    if content:
        (run / "metrics.json").write_text(content)
    watched, page = outputs(run, capsys)
    header, first, *table = watched.splitlines()
    assert header.split()[:3] == ["step", "loss", "grad_norm"] and first.split()[:3] == ["1/2", "8.25", "1.5"]
    assert "heat_last 292" in " ".join(" ".join(table).split())
    assert ">heat last</th>" in page and "temperature" not in page


def test_families_and_mistakes():
    names = [metric.key for base in RolloutSource.metrics for metric in base.expand(["short", "exact"])]
    assert {"rewards/short/mean", "rewards/exact/mean", "reward"} <= set(names) and len(names) == len(set(names))
    for wrong in ({"group": "results"}, {"summary": "first lest"}):
        refused("heat: expected one of", Metric, "heat", "temperature", **wrong, error=ValueError)
