"""Trackers such as TensorBoard, and the callback that sends the metrics of a run to them on rank 0.

The trackers are those of accelerate. They write their files to `trackers/` in the run directory, and do not use the
network unless environment variables of their libraries request it. Each tracker has a thread, which imports its
library, so no step waits for a tracker. A tracker that is too slow, hangs or fails is disabled with a warning.

Because a tracker cannot delete points, a resumed run starts a new series. It begins with the steps before the
checkpoint, which are read from ``metrics.jsonl``.
"""

import importlib.util
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from odc_mpi.errors import UserError, one_line_message, warn
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import read_metrics

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "odc_mpi"
#: Values of `run.report_to`, named as in accelerate, with the packages that each tracker requires besides accelerate.
TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet_ml",),
    "clearml": ("clearml",),
    "swanlab": ("swanlab",),
}
DIRECTORY = "trackers"
#: Maximum number of steps in the queue of a tracker. If the queue is full, the tracker is disabled.
MAX_WAITING = 10_000
#: Maximum time for trackers to write their queued steps at the end of a run, in seconds.
FINISH_S = 30.0
#: Step number, and the values of the step keyed by tag. Step 0 is the state before the first step.
LogRecord: TypeAlias = tuple[int, dict[str, float]]


class TrackerCallback(Callback):
    """Sends the metrics of every step to trackers. Must run after the callbacks that add the metrics.

    Args:
        names: Names of the trackers, which are keys of `TRACKERS`. Must be empty on all ranks except rank 0.
        config: Settings of the run, keyed by dotted name, for the trackers to store.
        finish_s: Maximum time to wait for the trackers at the end of the run, in seconds.
    """

    def __init__(
        self, names: Sequence[str], run_dir: Path, config: Mapping[str, Any], finish_s: float = FINISH_S
    ) -> None:
        self._names, self._run_dir, self._finish_s = dict.fromkeys(names), run_dir, finish_s
        self._config = config
        self._threads: list[TrackerThread] = []

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Start a thread per tracker. Each thread first writes the earlier steps from ``metrics.jsonl``."""
        if not self._names:
            return
        previous = [_record(line) for line in read_metrics(self._run_dir, completed_steps)]
        run_name = self._run_dir.resolve().name
        for name in self._names:
            make = partial(start_tracker, name, self._run_dir / DIRECTORY / name, run_name, self._config)
            self._threads.append(TrackerThread(name, make, previous))

    def on_step_end(self, step: Step) -> None:
        """Queue the metrics of the step and return immediately."""
        for thread in self._threads:
            thread.put([_record(step.metrics)])

    def close(self) -> None:
        """Wait until the trackers have written their queued steps, for at most `finish_s` in total."""
        end = time.monotonic() + self._finish_s
        for thread in self._threads:
            thread.put(None)
        while self._threads:
            self._threads.pop().join(max(0.0, end - time.monotonic()))


class TrackerThread:
    """Thread that creates a tracker with `make`, writes the records in `previous`, and then writes queued records."""

    def __init__(self, name: str, make: Callable[[], "GeneralTracker"], previous: list[LogRecord]) -> None:
        self._name, self._make = name, make
        self._failed = False
        self._waiting: queue.Queue[list[LogRecord] | None] = queue.Queue(MAX_WAITING)
        self._waiting.put_nowait(previous)
        self._thread = threading.Thread(target=self._run, name=f"odc_mpi-{name}", daemon=True)
        self._thread.start()

    def put(self, records: list[LogRecord] | None) -> None:
        """Queue the records of a step, or None to end the thread. A full queue disables the tracker with a warning."""
        if self._failed:
            return
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end. If it is still alive after `timeout_s` seconds, warn and disable the tracker."""
        if not self._failed:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._give_up("it did not write the last steps in time")

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (records := self._waiting.get()) is not None and not self._failed:
                for step, values in records:
                    tracker.log(values, step=step)
            tracker.finish()
        except BaseException as error:  # also SystemExit: no error of a library ends the run
            self._give_up(one_line_message(error))

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            warn(f"WARNING: run.report_to: {self._name} disabled for the rest of the run: {reason}")


def _record(metrics: Mapping[str, Any]) -> LogRecord:
    return int(metrics["step"]), metrics_by_tag({key: value for key, value in metrics.items() if key != "step"})


def metrics_by_tag(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers in `metrics`, keyed by the tags that transformers' `rewrite_logs` would use."""
    return {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def require_tracker_packages(names: Sequence[str]) -> None:
    """Raise `UserError` if a tracker's package is missing. Initialize accelerate if `names` is not empty."""
    for name in names:
        packages = ("accelerate", *TRACKERS[name])
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise UserError(
                    f"run.report_to: {name} needs the package {package}, which is not installed: "
                    f"pip install {' '.join(packages)}, or remove {name}"
                )
    if names:
        from accelerate import PartialState
        from accelerate.utils import patch_environment

        # Loggers of accelerate need this state. With LOCAL_RANK set, it would start torch.distributed.
        with patch_environment(LOCAL_RANK="-1", ACCELERATE_TORCH_DEVICE="cpu"):
            PartialState()


def start_tracker(name: str, directory: Path, run_name: str, config: Mapping[str, Any]) -> "GeneralTracker":
    """Start the tracker `name`, a key of `TRACKERS`, and return it. Call `require_tracker_packages` first.

    `directory` is emptied first. Trackers write their files there, except ClearML, and except Trackio and MLflow if
    their environment variables name another place. `run_name` is the display name of the run, and `config` contains its
    settings; TensorBoard uses neither.
    """
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project, options = _options(name, directory.resolve(), run_name)
    tracker = LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    if name != "tensorboard":  # it would show the settings as a second run
        tracker.store_init_configuration(dict(config))
    return tracker


def _options(name: str, directory: Path, run_name: str) -> tuple[str, dict[str, Any]]:
    """Return the project and the keyword arguments with which to construct the tracker class of accelerate."""
    match name:
        case "tensorboard":
            # The class appends the project to the directory. With purge_step, a running TensorBoard drops the points of
            # the file that the new file replaces.
            return directory.name, {"logging_dir": directory.parent, "purge_step": 0}
        case "mlflow":
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
            import mlflow

            for logger in ("mlflow", "alembic"):  # they log each table that they create
                logging.getLogger(logger).setLevel(logging.ERROR)
            options: dict[str, Any] = {"run_name": run_name}
            if "MLFLOW_TRACKING_URI" not in os.environ:
                mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
                options["logging_dir"] = (directory / "artifacts").as_uri()
            return PROJECT, options
        case "wandb":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no telemetry
            settings: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
            settings["x_disable_stats"] = True  # no thread that samples system metrics
            mode = os.environ.get("WANDB_MODE", "offline")
            options = {"name": run_name, "dir": str(directory), "mode": mode, "settings": settings}
            return os.environ.get("WANDB_PROJECT", PROJECT), options
        case "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(directory))
            return PROJECT, {"name": run_name, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        case "comet_ml":
            from comet_ml import ExperimentConfig

            online = None if "COMET_START_ONLINE" in os.environ else False
            quiet: dict[str, Any] = {"auto_output_logging": False, "log_code": False, "parse_args": False}
            experiment_config = ExperimentConfig(name=run_name, offline_directory=str(directory), **quiet)
            return PROJECT, {"online": online, "experiment_config": experiment_config}
        case "clearml":
            os.environ.setdefault("CLEARML_OFFLINE_MODE", "1")
            parts = ("frameworks", "arg_parser", "streams")
            options = {"task_name": run_name, "reuse_last_task_id": False, "auto_resource_monitoring": False}
            return PROJECT, options | {f"auto_connect_{part}": False for part in parts}
        case _:
            mode = os.environ.get("SWANLAB_MODE", "offline")
            return PROJECT, {"experiment_name": run_name, "logdir": str(directory), "mode": mode}
