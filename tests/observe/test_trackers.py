"""A run as TensorBoard's own reader sees it, also with repeated steps; no tracker delays a run."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from odc_mpi.observe import trackers
from odc_mpi.observe.callback import Step
from odc_mpi.observe.metrics import METRICS, MetricsWriter
from odc_mpi.observe.trackers import TRACKERS, TrackerCallback, require_tracker_packages

CONFIG = {"run.steps": 8, "model.path": None, "lora.target_modules": ["q_proj"]}


def train(run_dir, name, done, steps, scale):
    """Run steps whose loss shows which start they are of."""
    lines = (run_dir / METRICS).read_text().splitlines()[: done + 1] if done else []
    run_dir.mkdir(exist_ok=True)
    (run_dir / METRICS).write_text("".join(f"{line}\n" for line in lines))  # as a run that goes on leaves it
    if name in TRACKERS:
        require_tracker_packages([name])
    tracked = TrackerCallback([name], run_dir, CONFIG)
    with MetricsWriter(run_dir) as writer:
        if not done:
            writer.write({"step": 0, "eval_loss": 9.0, "eval_reward": 0.25})
        tracked.on_train_begin(done, {})
        for number in range(done + 1, steps + 1):
            metrics = {"step": number, "epoch": number / 2, "loss": scale * number, "grad_norm": None}
            metrics |= {"step_s": 0.5, "skipped": False, "time": "2026-01-01T00:00:00+00:00"}
            metrics |= {"eval_loss": scale + number, "eval_s": float("nan")} if number % 2 == 0 else {}
            writer.write(metrics)
            tracked.on_step_end(Step(number, SimpleNamespace(), metrics))
    tracked.close()


def read_tensorboard(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place)).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_run_that_repeats_steps_has_each_once(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    run_dir = tmp_path / "run"
    for arguments in ((0, 6, 1.0), (3, 8, 10.0)):  # the second start from the checkpoint of step 3
        train(run_dir, "tensorboard", *arguments)
    found = read_tensorboard(run_dir / "trackers" / "tensorboard")
    losses = [(1, 1.0), (2, 2.0), (3, 3.0), *((step, 10.0 * step) for step in range(4, 9))]
    assert found["train/loss"] == losses
    assert found["eval/loss"] == [(0, 9.0), (2, 3.0), (4, 14.0), (6, 16.0), (8, 18.0)]
    assert found["eval/reward"] == [(0, 0.25)]
    assert found["train/epoch"] == [(step, step / 2) for step in range(1, 9)]
    assert found.keys() == {"train/loss", "eval/loss", "eval/reward", "train/epoch", "train/step_s", "train/skipped"}
    _, second = sorted((run_dir / "trackers" / "tensorboard").glob("events.*"))
    assert [step for step, _ in read_tensorboard(second)["train/loss"]] == [4, 5, 6, 7, 8], "others are not sent again"


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_a_run_on_an_mlflow_server_continues(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    for arguments in ((0, 6, 1.0), (3, 8, 10.0)):
        train(tmp_path / "run", "mlflow", *arguments)
    (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("odc_mpi").experiment_id])
    assert run.info.run_id == (tmp_path / "run" / "trackers" / "mlflow" / "run_id").read_text()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert {(point.step, point.value) for point in history} == {
        *((step, 1.0 * step) for step in range(1, 7)),
        *((step, 10.0 * step) for step in range(4, 9)),
    }


def test_a_run_on_a_wandb_server_continues(tmp_path, monkeypatch):
    """By a replacement for accelerate's class, because W&B resumes no offline run."""
    tracking = pytest.importorskip("accelerate.tracking")
    runs = []

    class Server(Broken):
        def __init__(self, project, **options):
            super().__init__()
            runs.append(options)
            self.tracker = SimpleNamespace(id=options.get("id") or f"id{len(runs)}")
            self.steps = options["steps"] = []

        def start(self, *_):
            pass

        store_init_configuration = start

        def log(self, values, step):
            if step == 7:
                raise OSError("no answer")
            self.steps.append(step)

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", Server)
    monkeypatch.setattr("test_trackers.require_tracker_packages", lambda names: None)
    monkeypatch.setenv("WANDB_MODE", "online")
    for done, steps in ((0, 5), (3, 6), (5, 8), (6, 6)):
        train(tmp_path / "run", "wandb", done, steps, 1.0)
    assert [run.get("id") for run in runs] == [None, "id1", "id1", None]
    assert [run.get("resume") for run in runs] == [None, "allow", "allow", None]
    # The third was disabled, so the fourth is new.
    assert [run["steps"] for run in runs] == [[0, 1, 2, 3, 4, 5], [4, 5, 6], [6], [0, 1, 2, 3, 4, 5, 6]]
    monkeypatch.delenv("WANDB_MODE")
    train(tmp_path / "run", "wandb", 6, 6, 1.0)
    assert "id" not in runs[-1] and runs[-1]["steps"] == [0, 1, 2, 3, 4, 5, 6]


def test_the_environment_chooses_server_and_project(tmp_path, monkeypatch):
    assert trackers._options("wandb", tmp_path, "run")[1]["mode"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    project, options = trackers._options("wandb", tmp_path, "run")
    assert (project, options["mode"]) == ("mine", "online")
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert trackers._options("mlflow", tmp_path, "run")[1] == {"run_name": "run", "run_id": None}


def test_a_launcher_that_sets_local_rank_starts_no_torch_distributed():
    environment = {**os.environ, "LOCAL_RANK": "1", "PMI_SIZE": "2"}
    code = (
        "import accelerate, os; from odc_mpi.observe.trackers import require_tracker_packages as require; "
        "require(['tensorboard']); "
        "assert accelerate.PartialState().num_processes == 1 and os.environ['LOCAL_RANK'] == '1'"
    )
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


class Broken:
    """Takes some points, then raises or hangs."""

    hang = None

    def __init__(self, *_):
        self.num = 0

    def log(self, values, step):
        self.num += 1
        if self.num > 1 and self.hang:
            self.hang.wait()
        elif self.num > 1:
            raise SystemExit("the disk is full")

    def finish(self):
        pass


def test_a_tracker_that_fails_warns_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "start_tracker", Broken)
    train(tmp_path / "run", "broken", done=0, steps=20, scale=1.0)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "run.report_to: broken disabled for the rest of the run: the disk is full" in errors


def test_a_tracker_that_hangs_holds_up_no_step_and_no_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "start_tracker", Broken)
    monkeypatch.setattr(Broken, "hang", threading.Event())
    monkeypatch.setattr(trackers, "MAX_WAITING", 50)
    began = time.monotonic()
    for steps, options, warning in (
        (3, {"finish_s": 0.2}, "it did not write the last steps in time"),
        (199, {}, "it is 50 steps behind"),
    ):
        tracked = TrackerCallback(["broken"], tmp_path, CONFIG, **options)
        tracked.on_train_begin(0, {})
        for number in range(1, steps + 1):
            tracked.on_step_end(Step(number, SimpleNamespace(), {"step": number}))
        tracked.close()
        assert capsys.readouterr().err.count(warning) == 1
    assert time.monotonic() - began < 10
    Broken.hang.set()
