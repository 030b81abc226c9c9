"""Hidden states after the frozen prefix of a model, in `RUN/frozen_prefix` (`model.cache_frozen_prefix`).

on_optimizer_step  at the end of a data epoch, after an evaluation and before a checkpoint, complete this rank's file
on_step_end        then find the files of all ranks, which have synchronized since (B in docs/ordering.md)
on_train_begin     both, with a barrier in between, since a reference model may have run (collective)
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from odc_mpi.data.dataset.hidden_states import HiddenStates
from odc_mpi.data.dataset.reader import Dataset
from odc_mpi.errors import UserError
from odc_mpi.models.frozen_prefix import FrozenPrefix
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.settings import Config

DIRECTORY = "frozen_prefix"


def _datasets(inputs: Inputs) -> list[Dataset]:
    return [data for data in inputs.datasets.values() if isinstance(data, Dataset)]


def _size(config: Config, inputs: Inputs) -> tuple[int, int]:
    """Return the number of tokens in the data sets of a run, and of the bytes that are stored for each token."""
    assert inputs.prefix is not None
    limit = config.data.eval_sequences or None
    lengths = [data.lengths[: None if data is inputs.dataset else limit] for data in _datasets(inputs)]
    dtype: torch.dtype = getattr(torch, config.model.param_dtype)
    return sum(int(each.sum()) for each in lengths), inputs.prefix.width * dtype.itemsize


def describe_prefix(config: Config, inputs: Inputs) -> str:
    """Return a description of the frozen prefix and the disk space that its hidden states need."""
    assert inputs.prefix is not None
    last, (num_tokens, num_bytes) = inputs.prefix.num_layers - 1, _size(config, inputs)
    size = f"{num_tokens * num_bytes / 2**20:,.1f} MiB"
    return (
        f"layers 0 to {last} of {inputs.prefix.num_all_layers} are computed once: {size} "
        f"for {num_tokens:,} tokens in {Path(config.run.dir) / DIRECTORY}"
    )


def open_prefix(context: RunContext, metadata: dict[str, Any]) -> FrozenPrefix | None:
    """Return the frozen prefix of a run, or None if its settings do not ask for it. Collective.

    `metadata` is that of the run's checkpoints. Raises `AllRanksUserError` if the disk lacks room.
    """
    config, world, inputs, prefix = context.config, context.world, context.inputs, context.inputs.prefix
    if prefix is None:
        return None
    directory, base, dtype = Path(config.run.dir) / DIRECTORY, metadata["base"], config.model.param_dtype
    identity = [base["sha256"], base["quantization"], metadata["transformers_config"], prefix.num_layers, dtype]
    identity += [data.digest() for data in _datasets(inputs)]
    identity += [metadata["versions"][name] for name in ("torch", "transformers")]
    if config.run.exact:  # the last bits depend on what was packed together
        identity += [config.data.max_tokens_per_microbatch, config.data.minibatch_sequences, config.run.seed]
    name = f"{world.gather_objects(time.time_ns())[0]:x}-{world.rank}"
    store = HiddenStates(directory, json.dumps(identity, sort_keys=True), name)
    num_tokens, num_bytes = _size(config, inputs)

    def require_room() -> None:
        needed = (num_tokens - store.num_tokens) * num_bytes
        existing = next(folder for folder in directory.absolute().parents if folder.exists())
        if (free := shutil.disk_usage(existing).free) < needed:
            raise UserError(
                f"model.cache_frozen_prefix: expected {needed / 2**20:,.1f} MiB of free disk space for {directory}, "
                f"got {free / 2**20:,.1f} MiB: free some, choose another run.dir, or set it to false"
            )

    world.run_on_all(require_room)
    return FrozenPrefix(inputs.model.module, prefix, store, getattr(torch, dtype))


class PrefixCache(Callback):
    """Completes and finds the files of a frozen prefix. Comes after callbacks that evaluate."""

    def __init__(self, context: RunContext) -> None:
        prefix = context.prefix
        assert prefix is not None
        self._world, self._every, self._store = context.world, context.config.run.checkpoint_every, prefix.store
        self._loader, self._is_due = context.inputs.loader, False
        prefix.on_switch = context.model.forget_order

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Delete files that cannot be used, and find what reference models and evaluations have stored. Collective."""
        if self._world.rank == 0 and (stale := self._store.stale):
            for path in stale:
                path.unlink(missing_ok=True)
            reason = "of another base, tokenizer, data set or setting, or incomplete"
            print(f"{stale[0].parent}: {len(stale)} files deleted: {reason}", flush=True)
        self._store.finish()
        self._world.gather_objects(None)
        self._store.refresh()

    def on_optimizer_step(self, step: Step) -> None:
        """Complete this rank's file if other ranks need it, or a restarted run might."""
        self._is_due |= self._loader.state_dict()["data_epoch"] > step.minibatch.data_epoch
        self._is_due |= self._every > 0 and step.number % self._every == 0
        if self._is_due:
            self._store.finish()

    def on_step_end(self, step: Step) -> None:
        """Find the files of all ranks if they are complete."""
        if self._is_due:
            self._store.refresh()
        self._is_due = "eval_s" in step.metrics

    def close(self) -> None:
        """Complete this rank's file, for a run that was stopped, and close all."""
        self._store.finish()
        self._store.close()
