"""Functions `train` and `prepare`, for use in scripts instead of the commands `odc-mpi train` and `odc-mpi prepare`.

Run the script as one process, or on several ranks with `mpiexec -n N python SCRIPT`. All ranks must make the same calls
with the same arguments. Errors that the user can correct are raised as `UserError` on every rank.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_mpi.data.prepare import PrepareOptions, PrepareReport
from odc_mpi.data.prepare import prepare as write_dataset
from odc_mpi.errors import AllRanksUserError, StoppedError, TrainingError, UserError
from odc_mpi.hub import resolve_model_path
from odc_mpi.observe.metrics import read_run_metrics
from odc_mpi.observe.rank_log import RankLog
from odc_mpi.runtime.ranks import mpi_startup
from odc_mpi.runtime.start.launch import is_launched, launched_rank
from odc_mpi.training import settings as configuration

if TYPE_CHECKING:
    from odc_mpi.runtime.world import World

_DAY_S = 86400.0


@dataclass(frozen=True)
class TrainResult:
    """Result of `train`, which is the same on all ranks.

    Attributes:
        run_dir: Directory of the run, which can be passed to `odc-mpi export`, or to another run as its `model`.
        losses: Training loss of each step that this run, or an earlier start of it, has taken.
        summary: Content of summary.json, or only the entry `steps` if the run was already complete.
    """

    run_dir: Path
    losses: list[float]
    summary: Mapping[str, Any]


def train(
    *,
    model: str | Path | Mapping[str, Any],
    data: str | Path | Mapping[str, Any],
    world: "World | None" = None,
    **settings: Any,
) -> TrainResult:
    """Train a model with the settings that `odc-mpi train` would read from a YAML file. Collective.

        odc_mpi.train(model="MODEL_DIR", data="chats.h5", run={"steps": 10}, optim={"learning_rate": 1e-5})

    Args:
        model: Directory of a Hugging Face model or of a run, the name of a Hub model, or a mapping with all settings in
            the section `model`.
        data: Path of a data set written by `prepare` or of a prompt file for GRPO, or a mapping with the settings in
            the section `data`.
        world: World of the ranks that train, which stays open. The default is a world of all ranks, closed at the end.
        settings: Other top-level entries of the YAML file, such as the section `run={"steps": 10}`.

    Raises:
        UserError: A setting is invalid, the settings, data and model do not match, or a sequence is damaged. In the
            last case, a checkpoint of the last complete step, if any, was saved.
        TrainingError: Training cannot continue, for example because of non-finite gradients.
        StoppedError: A stop was requested, for example by a signal. If training had begun, a checkpoint was saved.
    """
    model_and_data = {"model": model, "data": data}
    sections = {
        name: value if isinstance(value, Mapping) else {"path": value} for name, value in model_and_data.items()
    }
    with nullcontext(world) if world else _new_world() as ranks, RankLog(launched_rank()) as log:
        config = ranks.run_on_all(lambda: configuration.load_mapping(_plain({**sections, **settings}), "odc_mpi.train"))
        # Imported late: invalid settings are reported before torch and transformers are imported.
        from odc_mpi.training import train as training

        ranks.run_on_all(lambda: log.open(config.run.log_dir, ranks))
        summary = training.train(config, ranks)
        run_dir = Path(config.run.dir)
        # A run that began with the checkpoint of another has no lines of the first steps.
        lines = read_run_metrics(run_dir, sys.maxsize) if ranks.rank == 0 else []
        losses = ranks.gather_objects([line["loss"] for line in lines if "loss" in line])[0]
        return TrainResult(run_dir, losses[: summary["steps"]], summary)


def prepare(
    sources: str | Path | Sequence[str | Path], out: str | Path, *, world: "World | None" = None, **options: Any
) -> PrepareReport:
    """Tokenize text into a data set, like `odc-mpi prepare`. Collective: rank 0 writes it while the other ranks wait.

        odc_mpi.prepare("chats.jsonl", "chats.h5", tokenizer="MODEL_DIR", eval_fraction=0.02)

    Args:
        sources: Files, folders or Hugging Face data sets, each optionally followed by a colon and a weight.
        out: Path of the data set, on a file system that all nodes can access.
        world: World of the ranks that call this function, by default all ranks of the job.
        options: Fields of `PrepareOptions`, such as `tokenizer`, `max_length` and `eval_fraction`. `num_proc` is 1 by
            default. If it is larger, the script must call this function under `if __name__ == "__main__":`.

    Returns:
        Counts of sequences and tokens, which are the same on all ranks. The method `describe` formats them as text.

    Raises:
        UserError: An option or a source is invalid, or a file cannot be read or written. The data set is unchanged.
    """
    unknown = options.keys() - {item.name for item in fields(PrepareOptions)}
    if unknown:
        raise UserError(f"odc_mpi.prepare: expected fields of PrepareOptions, got {', '.join(sorted(unknown))}")
    specs = [str(source) for source in ([sources] if isinstance(sources, str | Path) else sources)]
    paths = ("tokenizer", "chat_template")
    files = {name: Path(options[name]).expanduser() for name in paths if options.get(name) is not None}

    def write() -> PrepareReport:
        if "tokenizer" in files:
            files["tokenizer"] = Path(resolve_model_path(str(files["tokenizer"]), "tokenizer", weights=False))
        return write_dataset(specs, Path(out).expanduser(), PrepareOptions(**{"num_proc": 1, **options, **files}))

    if world is None and not is_launched():
        return write()
    with nullcontext(world) if world else _new_world() as ranks:
        limit_s, ranks.timeout_s = ranks.timeout_s, _DAY_S  # the others wait for rank 0
        try:
            report = ranks.run_on_all(lambda: write() if ranks.rank == 0 else None)
        finally:
            ranks.timeout_s = limit_s
        return ranks.gather_objects(report)[0]  # type: ignore[return-value]


@contextmanager
def _new_world() -> Iterator["World"]:
    with mpi_startup():
        from odc_mpi.runtime.world import World
    with World() as world:
        try:
            yield world
        except (AllRanksUserError, TrainingError, StoppedError):  # raised on every rank
            world.close()
            raise


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
