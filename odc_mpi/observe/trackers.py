"""The trackers: each writes points with a library of its own into a directory. Local; no network, server or account.

A library is imported when its tracker is made, in the thread that writes.
"""

import importlib.util
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from odc_mpi.errors import UserError

#: The name under which trackers that know projects have all runs.
PROJECT = "odc_mpi"
#: The longest text of a setting that MLflow's oldest stores take.
_MAX_PARAM_CHARS = 250


class Point(NamedTuple):
    """What a step reports.

    Attributes:
        step: Counted from 1; 0 for what was before the first.
        time_s: Of `time.time`.
        values: By tag.
    """

    step: int
    time_s: float
    values: dict[str, float]


class About(NamedTuple):
    """The run that a tracker is told of.

    Attributes:
        directory: For the tracker's files; empty.
        name: Of the run.
        config: All settings, in sections.
    """

    directory: Path
    name: str
    config: Mapping[str, Any]


class Tracker(ABC):
    """Writes points, in the order of their steps; all methods are called by one thread.

    Attributes:
        modules: What has to be installed, by the extra of the tracker's name.
    """

    modules: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __init__(self, about: About) -> None: ...

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Write points such that a reader may see them. Local."""

    @abstractmethod
    def close(self) -> None:
        """End well. Local."""


class TensorBoard(Tracker):
    """An event file; `tensorboard --logdir` finds it."""

    modules = ("tensorboard",)

    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(about.directory))
        # A TensorBoard that is looking meanwhile drops what it had read before the file was written anew.
        self._writer.add_event(Event(session_log=SessionLog(status=SessionLog.START), step=0))

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Local."""
        for step, time_s, values in points:
            entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.add_event(self._event(wall_time=time_s, step=step, summary=self._summary(value=entries)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file. Local."""
        self._writer.close()


class MLflow(Tracker):
    """An SQLite store; `mlflow ui --backend-store-uri sqlite:///.../mlflow.db` shows it."""

    modules = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, about: About) -> None:
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        for name in ("mlflow", "alembic"):  # they tell of every table that they make
            logging.getLogger(name).setLevel(logging.ERROR)
        place = about.directory.resolve()
        self._client = MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
        experiment = self._client.create_experiment(PROJECT, artifact_location=(place / "artifacts").as_uri())
        self._run_id = self._client.create_run(experiment, run_name=about.name).info.run_id
        params = [Param(key, str(value)[:_MAX_PARAM_CHARS]) for key, value in flat(about.config)]
        self._client.log_batch(self._run_id, params=params[:100])

    def write(self, points: Sequence[Point]) -> None:
        """Write points, as many at a time as MLflow takes. Local."""
        metrics = [
            self._metric(tag, value, round(1000 * point.time_s), point.step)
            for point in points
            for tag, value in point.values.items()
        ]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + 1000])

    def close(self) -> None:
        """Mark the run as finished. Local."""
        self._client.set_terminated(self._run_id)


class WeightsAndBiases(Tracker):
    """Files of wandb's offline mode, for `wandb sync`. Its helper process, wandb-core, listens on a Unix socket."""

    modules = ("wandb",)

    def __init__(self, about: About) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"  # no telemetry
        import wandb

        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=PROJECT,
            name=about.name,
            dir=str(about.directory),
            config=dict(about.config),
            mode="offline",
            settings=quiet,
        )

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Local."""
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time_s}, step=point.step)

    def close(self) -> None:
        """End the helper process. Local."""
        self._run.finish()


class Trackio(Tracker):
    """An SQLite file; `TRACKIO_DIR=... trackio show` shows it.

    It is written without `trackio.init`, which asks the Hub for the user's name if there is an account.
    """

    modules = ("trackio",)

    def __init__(self, about: About) -> None:
        os.environ["TRACKIO_DIR"] = str(about.directory.resolve())
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._name = SQLiteStorage, about.name
        self._config: dict[str, Any] | None = dict(about.config)

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Local."""
        self._storage.bulk_log(
            PROJECT,
            self._name,
            [point.values for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time_s, timezone.utc).isoformat() for point in points],
            config=self._config,
        )
        self._config = None

    def close(self) -> None:
        """Do nothing: all is written. Local."""


#: The values of run.report_to.
TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


def require(names: Sequence[str]) -> None:
    """Check that the libraries of trackers are installed, without importing them. Local.

    Raises:
        UserError: One is not.
    """
    for name in names:
        for module in TRACKERS[name].modules:
            if importlib.util.find_spec(module) is None:
                raise UserError(
                    f"run.report_to: {name} needs the package {module}, which is not installed: "
                    f"pip install 'odc_mpi[{name}]', or leave {name} out"
                )


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as `section.key` and value. Local."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
