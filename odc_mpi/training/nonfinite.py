"""Report on a skipped step: the rank, sequence and unit of the first non-finite value.

A skipped step does not change the parameters, so a rank whose loss was not finite repeats the forward pass of the
microbatch and checks the output of each unit. If all losses were finite, the pushed gradients show the unit.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.errors import TrainingError, warn
from odc_mpi.files import write_or_warn
from odc_mpi.observe.callback import Callback, MicrobatchResult, Step
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.loop import Objective
from odc_mpi.training.rundir.records import ANOMALY
from odc_mpi.training.settings import RunConfig


class NonFiniteReport(Callback):
    """After each skipped step, reports the origin of the non-finite gradient: rank, sequences and unit, if known.

    With `run.detect_anomaly`, the first skipped step ends the run, and the origin is written to anomaly.json along with
    the model inputs of its sequences. Otherwise, the run ends after `run.max_skipped_steps` consecutive skipped steps.
    `metadata` is the metadata of the checkpoint from which the run resumes, which contains the number of consecutive
    steps skipped so far, or None for a new run.
    """

    def __init__(
        self,
        run: RunConfig,
        world: World,
        model: ShardedModel,
        objective: Objective,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._run, self._path = run, Path(run.dir) / ANOMALY
        self._world, self._model, self._objective = world, model, objective
        self._num_skipped: int = metadata["skipped_in_a_row"] if metadata else 0
        self._results: list[MicrobatchResult] = []

    def on_step_begin(self, step: Step) -> None:
        """Discard the results of the previous step."""
        self._results = []

    def on_microbatch_end(self, result: MicrobatchResult) -> None:
        """Keep the result of the microbatch until the next step begins."""
        self._results.append(result)

    def on_step_end(self, step: Step) -> None:
        """Report a skipped step, and fail with `TrainingError` if the run must end. Collective after a skipped step."""
        self._num_skipped = self._num_skipped + 1 if step.metrics["skipped"] else 0
        if not self._num_skipped:
            return
        gathered = self._world.gather_objects(self._locate(step))
        origin = next(filter(None, gathered), {"text": "all ranks: only the sum of their gradients"})
        text = f"step {step.number}: the gradient is not finite, first found on {origin.pop('text')}"
        if self._world.rank == 0:
            if self._run.detect_anomaly:
                write_or_warn(self._path, json.dumps({"step": step.number, **origin}) + "\n")
            else:
                warn(f"WARNING: {text}; the step is skipped")
        if self._run.detect_anomaly:
            step.failure = TrainingError(f"{text} (run.detect_anomaly; see {self._path})")
        elif self._num_skipped >= self._run.max_skipped_steps:
            raise TrainingError(
                f"step {step.number}: the gradient was not finite in {self._num_skipped} steps in a row, which is "
                "run.max_skipped_steps: lower optim.learning_rate or check the data"
            )

    def state_dict(self) -> dict[str, int]:
        """Return the current number of consecutive skipped steps, as the entry `skipped_in_a_row`."""
        return {"skipped_in_a_row": self._num_skipped}

    def _locate(self, step: Step) -> dict[str, Any] | None:
        """Return the origin of the first non-finite value on this rank, with its inputs, if any. One-sided."""
        for result in self._results:
            if not math.isfinite(result.loss):
                return self._describe(step, result.microbatch)
        units = self._model.units_with_nonfinite_gradients()
        if not units:
            return None
        origin = self._data([result.microbatch for result in self._results])
        text = f"rank {origin['rank']}: backward of unit {units[0] or '(root)'}, in one of {_name(origin)}"
        return {**origin, "unit": units[0], "text": text}

    def _describe(self, step: Step, microbatch: Microbatch) -> dict[str, Any]:
        origin, where = self._data([microbatch]), "loss"
        if not microbatch.is_chunk:  # the other chunks are on other ranks
            with torch.no_grad(), first_nonfinite(self._model) as first:
                self._objective.loss(step.minibatch, microbatch.to(self._model.device))
            if first:
                origin["unit"], where = first["unit"], f"output of unit {first['unit'] or '(root)'}"
                position_ids = microbatch.inputs.get("position_ids")
                if first["token"] is not None and position_ids is not None and position_ids.shape[0] == 1:
                    number = int((position_ids[0, : first["token"] + 1] == 0).sum()) - 1
                    if len(origin["sequences"]) == int((position_ids == 0).sum()):
                        origin["sequences"] = [origin["sequences"][number]]
        text = f"rank {origin['rank']}: {where}, {_name(origin)}"
        return {**origin, "text": text}

    def _data(self, microbatches: list[Microbatch]) -> dict[str, Any]:
        return {
            "rank": self._world.rank,
            "sequences": [int(index) for microbatch in microbatches for index in microbatch.indices],
            "inputs": [
                {name: value.tolist() for name, value in microbatch.inputs.items() if isinstance(value, torch.Tensor)}
                for microbatch in microbatches
            ],
        }


def _name(origin: dict[str, Any]) -> str:
    numbers = ", ".join(map(str, origin["sequences"]))
    return f"{'sequence' if len(origin['sequences']) == 1 else 'sequences'} {numbers} of data.path, counted from 0"


@contextmanager
def first_nonfinite(model: ShardedModel) -> Iterator[dict[str, Any]]:
    """Context manager that finds the first non-finite input or output of a unit in a forward pass. Yields a dictionary.

    The dictionary stays empty if all values are finite. Otherwise, `unit` is the name of the unit whose output is not
    finite, or "" for an input or for the root unit. `token` is the index of the first token with a non-finite value in
    the first row of the batch, or None if the values are not `[batch, tokens, features]`.
    """
    origin: dict[str, Any] = {}

    def check(name: str, values: Any) -> None:
        values = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        for value in () if origin else values:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
                rows = (~value.isfinite()).flatten(2).any(dim=2)[0] if value.ndim == 3 else None
                origin.update(unit=name, token=None if rows is None else int(rows.nonzero()[0]))
                return

    units = [(unit.name, model.module.get_submodule(unit.name)) for unit in model.units]
    handles = [module.register_forward_hook(lambda *args, name=name: check(name, args[2])) for name, module in units]
    handles += [module.register_forward_pre_hook(lambda _, args: check("", args)) for name, module in units if name]
    try:
        yield origin
    finally:
        for handle in handles:
            handle.remove()
