"""Trackers of accelerate, configured for a run directory. Used on rank 0 only.

Trackers write into the run directory and do not use the network, unless environment variables of the library request
it. A library is imported when its tracker starts, in the thread that writes.
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_mpi.errors import UserError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

#: Project name of all runs.
PROJECT = "odc_mpi"
#: Values of run.report_to, named as in accelerate, and the packages that each requires in addition to accelerate.
TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "comet_ml": ("comet_ml",),
    "clearml": ("clearml",),
    "swanlab": ("swanlab",),
}


def require_tracker_packages(names: Sequence[str]) -> None:
    """Raise UserError if a package of the trackers `names` is missing. Initialize accelerate if there are trackers."""
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
    """Start a tracker. Call `require_tracker_packages` first.

    Args:
        name: Name of the tracker, a key of `TRACKERS`.
        directory: Directory for the files of the tracker. An existing directory is removed first.
        run_name: Name under which the tracker shows the run.
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
    """Return the arguments of the accelerate class: the project, and options for the function of the library."""
    match name:
        case "tensorboard":
            # The class appends the project to the directory. purge_step makes a running TensorBoard drop the points
            # of the file that this one replaces.
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
