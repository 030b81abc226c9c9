"""Trackers such as TensorBoard, and the callback that sends the metrics of a run to them on rank 0.

The trackers are those of accelerate. They write their files to `trackers/` in the run directory, and do not use the
network unless environment variables of their libraries request it. Each tracker has a thread, which imports its
library, so no step waits for a tracker. A tracker that is too slow, hangs or fails is disabled with a warning.

A resumed run continues the tracker's run, whose ID is in `trackers/NAME/run_id`, if the tracker can: TensorBoard, and
MLflow and W&B on a server. Otherwise the tracker's files are written again, beginning with the steps before the
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import override

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
DIRECTORY, RUN_ID = "trackers", "run_id"
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
        """Start a thread per tracker, which first writes the earlier steps unless it continues the tracker's run."""
        for name in self._names:
            directory = self._run_dir / DIRECTORY / name
            file, run_id = directory / RUN_ID, None
            if file.exists() and _can_continue(name):
                run_id = file.read_text()
            earlier = [] if run_id else [_record(line) for line in read_metrics(self._run_dir, completed_steps)]
            run_name = self._run_dir.resolve().name
            make = partial(start_tracker, name, directory, run_name, self._config, run_id, completed_steps)
            self._threads.append(TrackerThread(name, directory, make, earlier))

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
            self._threads.pop().finish(max(0.0, end - time.monotonic()))


class TrackerThread(threading.Thread):
    """Thread that creates a tracker with `make`, writes the records in `earlier`, and then writes queued records."""

    def __init__(
        self, tracker: str, directory: Path, make: Callable[[], "GeneralTracker"], earlier: list[LogRecord]
    ) -> None:
        super().__init__(name=f"odc_mpi-{tracker}", daemon=True)
        self._tracker, self._directory, self._make = tracker, directory, make
        self._failed = False
        self._waiting: queue.Queue[list[LogRecord] | None] = queue.Queue(MAX_WAITING)
        self._waiting.put_nowait(earlier)
        self.start()

    def put(self, records: list[LogRecord] | None) -> None:
        """Queue the records of a step, or None to end the thread. A full queue disables the tracker with a warning."""
        try:
            if not self._failed:
                self._waiting.put_nowait(records)
        except queue.Full:
            self._give_up(f"it is {MAX_WAITING:,} steps behind")

    def finish(self, timeout_s: float) -> None:
        """Wait for the thread to end. If it is still alive after `timeout_s` seconds, warn and disable the tracker."""
        if not self._failed:
            self.join(timeout_s)
            if self.is_alive():
                self._give_up("it did not write the last steps in time")

    @override
    def run(self) -> None:
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
            warn(f"WARNING: run.report_to: {self._tracker} disabled for the rest of the run: {reason}")
            with suppress(OSError):  # steps are missing: a resumed run starts a new one with all steps
                (self._directory / RUN_ID).unlink()


def _record(metrics: Mapping[str, Any]) -> LogRecord:
    """Return the step and the finite numbers in `metrics`, keyed by the tags that transformers' callbacks use."""
    return int(metrics["step"]), {
        f"eval/{key.removeprefix('eval_')}" if key.startswith("eval_") else f"train/{key}": float(value)
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
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


def _can_continue(name: str) -> bool:
    # W&B resumes no offline run, and MLflow would have repeated steps twice, which its own database need not.
    on_server = {"mlflow": "MLFLOW_TRACKING_URI" in os.environ, "wandb": os.environ.get("WANDB_MODE") == "online"}
    return name == "tensorboard" or on_server.get(name, False)


def start_tracker(
    name: str, directory: Path, run_name: str, config: Mapping[str, Any], run_id: str | None, completed_steps: int
) -> "GeneralTracker":
    """Start the tracker `name`, a key of `TRACKERS`, and return it. Call `require_tracker_packages` first.

    Continues the run `run_id` after `completed_steps` steps. If `run_id` is None, starts a new run, and first empties
    `directory`. Trackers write their files there, except ClearML, and except Trackio and MLflow if their environment
    variables name another place. `run_name` is the display name of a new run, and `config` contains its settings;
    TensorBoard uses neither.
    """
    if run_id is None and directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    project, options = _options(name, directory.resolve(), run_name, run_id, completed_steps)
    tracker = LOGGER_TYPE_TO_CLASS[name](project, **options)
    tracker.start()
    if run_id is None and name != "tensorboard":  # it would show the settings as a second run
        tracker.store_init_configuration(dict(config))
    if _can_continue(name):
        ids = {"mlflow": lambda run: run.info.run_id, "wandb": lambda run: run.id}
        (directory / RUN_ID).write_text(ids.get(name, lambda _: name)(tracker.tracker))
    return tracker


def _options(
    name: str, directory: Path, run_name: str, run_id: str | None = None, completed_steps: int = 0
) -> tuple[str, dict[str, Any]]:
    """Return the project and the keyword arguments with which to construct the tracker class of accelerate."""
    options: dict[str, Any]
    match name:
        case "tensorboard":
            # The class appends the project to the directory. TensorBoard drops earlier points from purge_step on.
            purge_step = completed_steps + 1 if run_id else 0
            return directory.name, {"logging_dir": directory.parent, "purge_step": purge_step}
        case "mlflow":
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
            import mlflow

            for logger in ("mlflow", "alembic"):  # they log each table that they create
                logging.getLogger(logger).setLevel(logging.ERROR)
            options = {"run_name": run_name, "run_id": run_id}
            if "MLFLOW_TRACKING_URI" not in os.environ:
                mlflow.set_tracking_uri(f"sqlite:///{directory / 'mlflow.db'}")
                options["logging_dir"] = (directory / "artifacts").as_uri()
            return PROJECT, options
        case "wandb":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no telemetry
            # Without stats, no thread samples system metrics.
            quiet = dict.fromkeys(("silent", "disable_git", "disable_code", "x_disable_stats"), True)
            options = {"name": run_name, "dir": str(directory), "settings": quiet | {"console": "off"}}
            options["mode"] = os.environ.get("WANDB_MODE", "offline")
            options |= {"id": run_id, "resume": "allow"} if run_id else {}
            return os.environ.get("WANDB_PROJECT", PROJECT), options
        case "trackio":
            os.environ.setdefault("TRACKIO_DIR", str(directory))
            return PROJECT, {"name": run_name, "embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        case "comet_ml":
            from comet_ml import ExperimentConfig

            quiet = dict.fromkeys(("auto_output_logging", "log_code", "parse_args"), False)
            experiment = ExperimentConfig(name=run_name, offline_directory=str(directory), **quiet)
            online = None if "COMET_START_ONLINE" in os.environ else False
            return PROJECT, {"online": online, "experiment_config": experiment}
        case "clearml":
            os.environ.setdefault("CLEARML_OFFLINE_MODE", "1")
            options = {"task_name": run_name, "reuse_last_task_id": False, "auto_resource_monitoring": False}
            return PROJECT, options | {
                f"auto_connect_{part}": False for part in ("frameworks", "arg_parser", "streams")
            }
        case _:
            mode = os.environ.get("SWANLAB_MODE", "offline")
            return PROJECT, {"experiment_name": run_name, "logdir": str(directory), "mode": mode}
