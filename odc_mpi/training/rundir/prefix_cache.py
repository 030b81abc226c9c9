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
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.settings import Config

DIRECTORY = "frozen_prefix"


def count_tokens(config: Config, inputs: Inputs) -> int:
    """Return the number of tokens in the data sets of a run, of which the prefix is computed once."""
    limit = config.data.eval_sequences or None
    lengths = [(data.lengths, None if data is inputs.dataset else limit) for data in _datasets(inputs)]
    return sum(int(each[:stop].sum()) for each, stop in lengths)


def bytes_per_token(config: Config, inputs: Inputs) -> int:
    """Return the number of bytes that are stored for each token."""
    assert inputs.prefix is not None
    return inputs.prefix.width * getattr(torch, config.model.param_dtype).itemsize


def describe_prefix(config: Config, inputs: Inputs) -> str:
    """Return a description of the frozen prefix and the disk space that its hidden states need."""
    assert inputs.prefix is not None
    prefix, num_tokens = inputs.prefix, count_tokens(config, inputs)
    needed = num_tokens * bytes_per_token(config, inputs) / 2**20
    return (
        f"layers 0 to {prefix.num_layers - 1} of {prefix.num_all_layers} are computed once: {needed:,.1f} MiB for "
        f"{num_tokens:,} tokens in {Path(config.run.dir) / DIRECTORY}"
    )


def open_prefix(context: RunContext, metadata: dict[str, Any]) -> FrozenPrefix | None:
    """Return the frozen prefix of a run, or None if its settings do not ask for it. Collective.

    `metadata` is that of the run's checkpoints. Raises `AllRanksUserError` if the disk lacks room.
    """
    config, world, inputs = context.config, context.world, context.inputs
    if inputs.prefix is None:
        return None
    prefix, directory = inputs.prefix, Path(config.run.dir) / DIRECTORY
    identity: dict[str, Any] = {
        "base": [metadata["base"]["sha256"], metadata["base"]["quantization"]],
        "model": metadata["transformers_config"],
        "prefix": [prefix.num_layers, prefix.width, config.model.param_dtype],
        "data": [data.digest() for data in _datasets(inputs)],
        "versions": [metadata["versions"][name] for name in ("torch", "transformers")],
    }
    if config.run.exact:  # the last bits depend on what was packed together
        identity["packing"] = [config.data.max_tokens_per_microbatch, config.data.minibatch_sequences, config.run.seed]
    name = f"{world.gather_objects(time.time_ns())[0]:x}-{world.rank}"
    store = HiddenStates(directory, json.dumps(identity, sort_keys=True), name)
    num_missing = max(0, count_tokens(config, inputs) - store.num_tokens)
    needed = num_missing * bytes_per_token(config, inputs)
    world.run_on_all(lambda: _require_room(directory, needed) if world.rank == 0 else None)
    return FrozenPrefix(inputs.model.module, prefix, store, getattr(torch, config.model.param_dtype))


def _datasets(inputs: Inputs) -> list[Dataset]:
    return [data for data in inputs.datasets.values() if isinstance(data, Dataset)]


def _require_room(directory: Path, num_bytes: int) -> None:
    existing = next(folder for folder in directory.absolute().parents if folder.exists())
    if (free := shutil.disk_usage(existing).free) < num_bytes:
        raise UserError(
            f"model.cache_frozen_prefix: expected {num_bytes / 2**20:,.1f} MiB of free disk space for {directory}, got "
            f"{free / 2**20:,.1f} MiB: free some, choose another run.dir, or set it to false"
        )


class PrefixCache(Callback):
    """Completes and finds the files of a frozen prefix. Comes after callbacks that evaluate."""

    def __init__(self, context: RunContext, model: ShardedModel, prefix: FrozenPrefix) -> None:
        self._world, self._run, self._prefix = context.world, context.config.run, prefix
        self._loader = context.inputs.loader
        self._is_due = False
        prefix.on_switch = model.forget_order

    def on_train_begin(self, completed_steps: int, metrics: dict[str, Any]) -> None:
        """Delete files that cannot be used, and find what reference models and evaluations have stored. Collective."""
        stale = self._prefix.store.stale
        if self._world.rank == 0 and stale:
            for path in stale:
                path.unlink(missing_ok=True)
            reason = "of another base, tokenizer, data set or setting, or incomplete"
            print(f"{stale[0].parent}: {len(stale)} files deleted: {reason}", flush=True)
        stale.clear()
        self._prefix.store.finish()
        self._world.gather_objects(None)
        self._prefix.refresh()
        self._is_due = False

    def on_optimizer_step(self, step: Step) -> None:
        """Complete this rank's file if other ranks need it, or a restarted run might."""
        ends_epoch = self._loader.state_dict()["data_epoch"] > step.minibatch.data_epoch
        every = self._run.checkpoint_every
        self._is_due |= ends_epoch or bool(every and step.number % every == 0)
        if self._is_due:
            self._prefix.store.finish()

    def on_step_end(self, step: Step) -> None:
        """Find the files of all ranks if they are complete."""
        if self._is_due:
            self._prefix.refresh()
        self._is_due = "eval_s" in step.metrics

    def close(self) -> None:
        """Complete this rank's file, for a run that was stopped, and close all."""
        self._prefix.store.finish()
        self._prefix.store.close()
