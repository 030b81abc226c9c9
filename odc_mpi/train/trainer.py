"""A training run: the parts put together, and the loop.

set up    collective: all ranks agree on configuration, data and model, and allocate windows
step      one minibatch: microbatches (one-sided), A, N if gradients are clipped, optimizer (local), B
finish    collective: every rank's totals are gathered
"""

import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.tickets import Tickets
from odc_mpi.comm.world import World
from odc_mpi.data.fitted import ROW_LENGTH, FittedCost
from odc_mpi.data.loader import Batch, Minibatch, read_batch
from odc_mpi.errors import TrainingError
from odc_mpi.shard import model as sharded
from odc_mpi.shard.optim import build_optimizer, schedule_factor
from odc_mpi.train.config import Config, OptimConfig, dump
from odc_mpi.train.inputs import Inputs, open_inputs
from odc_mpi.train.log import Log
from odc_mpi.train.metrics import StepMetrics, terminal_width
from odc_mpi.train.rundir import open_run_directory

#: What every rank tells the others at point A: its part of the loss, seconds, what it ran ...
_TOLD = ("loss", "busy_s", "fetch_s", "accumulate_s", "microbatches")
#: ... and what it learned of the cost, where that is fitted.
_TOLD_OF_COST = tuple(f"cost_{i}" for i in range(ROW_LENGTH))


def train(config: Config, world: World) -> dict[str, Any]:
    """Run a configuration from the first step to the last. Collective.

    Args:
        config: As `config.load` returns it.
        world: The ranks.

    Returns:
        The summary, the same on every rank but for times.

    Raises:
        AgreedError: Settings, data and model do not fit together, or not all ranks see the same; raised on every rank
            before anything is written.
        TrainingError: Too many steps in a row had gradients that are not finite; raised on every rank.
    """
    world.timeout_s = config.comm.timeout_s
    cores = world.cores_per_rank()
    if config.run.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.run.threads or cores)
    world.require_same(dump(config), "the configuration")
    inputs = world.agree(lambda: open_inputs(config, world))
    world.require_same(inputs.dataset.digest(), f"data.path: {config.data.path}")
    trainer = Trainer(config, world, inputs)
    del inputs  # the weights that it can read have been read
    run_dir = Path(config.run.dir)
    # Not earlier: whatever is wrong has to be found before anything is written.
    world.agree(lambda: _open_run(run_dir, config) if world.rank == 0 else None)
    opening = f"{world.mpi_library}, ranks {world.size}, nodes {world.num_nodes}: {trainer.decision.one_line()}"
    with trainer, Log(run_dir, config.run.steps, opening, speaks=world.rank == 0) as log:
        for _ in range(config.run.steps):
            log.step(trainer.step())
            trainer.check_skipped()
        return log.finish(trainer.facts())


class Trainer:
    """The model, its optimizer and the step; leaving it as a context closes the data set. Making one is collective.

    Args:
        config: Of the run.
        world: The ranks.
        inputs: What `open_inputs` returned.
    """

    def __init__(self, config: Config, world: World, inputs: Inputs) -> None:
        self._config = config
        self._world = world
        self._dataset = inputs.dataset
        self._loader = inputs.loader
        self._fitted = FittedCost(self._loader.cost) if config.data.cost == "fitted" else None
        self._done = 0
        self._skipped_in_a_row = 0
        comm = config.comm
        self.decision = decide_for(
            world,
            transport=comm.transport,
            zero_copy=comm.zero_copy,
            reduction=comm.reduction,
            progress=comm.progress,
        )
        self.model = shard_model(
            inputs.model.module,
            world,
            param_dtype=getattr(torch, config.model.param_dtype),
            reduce_dtype=getattr(torch, config.model.reduce_dtype),
            activation_checkpointing=config.model.gradient_checkpointing,
            prefetch=config.comm.prefetch,
            weights=inputs.model.weights,
            decision=self.decision,
            mailbox_bytes=comm.mailbox_bytes,
        ).train()
        self._tickets = Tickets(world) if config.data.balance == "dynamic" else None
        # With collectives ranks wait for the slowest in each fetch and push, not at A.
        self._waits_apart = self.decision.transport == "window"
        self._start_collectives = self.model.num_collectives
        self.optimizer = _optimizer(config.optim, self.model)

    def step(self) -> StepMetrics:
        """Train on the next minibatch. Collective, at the ordering points only.

        Returns:
            What happened, the same on every rank but for `step_s` and `tokens_per_s`.
        """
        began = time.perf_counter()
        learning_rate = self._set_learning_rate()
        minibatch = next(self._loader)
        totals = self._run_microbatches(minibatch)
        max_norm = self._config.optim.max_grad_norm
        norm = self.model.clip_grad_norm_(max_norm) if max_norm else None
        finite = totals.finite and (norm is None or math.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.model.publish()
        self._done += 1
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        step_s = time.perf_counter() - began
        return _metrics(self._done, minibatch, totals, norm, learning_rate, step_s, finite)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._dataset.close()

    def facts(self) -> dict[str, Any]:
        """Return what the summary tells besides the steps. Collective."""
        model, steps = self.model, max(1, self._done)
        own = [model.peak_parameter_bytes, model.fetch_wait_s, model.accumulate_wait_s, model.boundary_wait_s]
        everyone = np.array(self._world.gather_objects(own))
        fetch_s, accumulate_s, boundary_s = (float(seconds) for seconds in everyone[:, 1:].mean(axis=0))
        return {
            "world_size": self._world.size,
            "num_nodes": self._world.num_nodes,
            "transport": self._config.comm.transport,
            "reduction": self.decision.reduction.choice,
            "balance": self._config.data.balance,
            "zero_copy": self.decision.zero_copy.choice,
            "progress": self.decision.progress.choice,
            "param_dtype": self._config.model.param_dtype,
            "peak_parameter_bytes": int(everyone[:, 0].max()),
            "collectives_per_minibatch": (model.num_collectives - self._start_collectives) / steps,
            "fetch_wait_s": fetch_s,
            "accumulate_wait_s": accumulate_s,
            "boundary_wait_s": boundary_s,
            "mpi_library": self._world.mpi_library,
            "run_dir": self._config.run.dir,
        }

    def _run_microbatches(self, minibatch: Minibatch) -> sharded.Minibatch:
        """Forward and backward of this rank's microbatches: nobody waits until the end, which is point A."""
        model = self.model
        with model.minibatch(*_TOLD, *(_TOLD_OF_COST if self._fitted else ())) as totals:
            began, fetch_s, accumulate_s = time.perf_counter(), model.fetch_wait_s, model.accumulate_wait_s
            for batch in minibatch.batches(self._tickets.draw) if self._tickets else minibatch:
                totals.values["loss"] += self._run_microbatch(minibatch, batch)
                totals.values["microbatches"] += 1
            if not self._waits_apart:
                self._pad(minibatch)
            totals.values["fetch_s"] = model.fetch_wait_s - fetch_s
            totals.values["accumulate_s"] = model.accumulate_wait_s - accumulate_s
            totals.values["busy_s"] = time.perf_counter() - began
            if not self._waits_apart:
                totals.values["busy_s"] -= totals.values["fetch_s"] + totals.values["accumulate_s"]
            if self._fitted:
                totals.values.update(zip(_TOLD_OF_COST, self._fitted.report().tolist(), strict=True))
        if self._tickets:
            self._tickets.reset()
        if self._fitted:
            self._fitted.update(np.stack([totals.per_rank(name) for name in _TOLD_OF_COST], axis=1))
            self._loader.cost = self._fitted.cost
        return totals

    def _pad(self, minibatch: Minibatch) -> None:
        """Take part in what other ranks have more microbatches for, on the shortest sequence and for nothing."""
        turns = [sum(map(bool, own)) for own in minibatch.plan.microbatches]
        for _ in range(max(turns) - turns[self._world.rank]):
            shortest = int(self._dataset.lengths[minibatch.indices].argmin())
            batch = read_batch(self._dataset, minibatch.indices[shortest : shortest + 1])
            with self.model.padding():
                self.model(**batch.inputs).loss.backward()

    def _run_microbatch(self, minibatch: Minibatch, batch: Batch) -> float:
        # Random numbers belong to the microbatch, not to the rank that happens to run it.
        torch.manual_seed(_seed(self._config.run.seed, minibatch.data_epoch, int(batch.indices[0])))
        began, waited_s = time.perf_counter(), self._waited_s()
        loss = self.model(**batch.inputs).loss * (batch.num_tokens / minibatch.num_tokens)
        loss.backward()
        if self._fitted:
            seconds = time.perf_counter() - began - (self._waited_s() - waited_s)
            self._fitted.observe(self._dataset.lengths[batch.indices], seconds)
        return loss.item()

    def _waited_s(self) -> float:
        return self.model.fetch_wait_s + self.model.accumulate_wait_s

    def _set_learning_rate(self) -> float:
        optim = self._config.optim
        factor = schedule_factor(optim.lr_scheduler_type, self._done, optim.warmup_steps, self._config.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = optim.learning_rate * factor
        return optim.learning_rate * factor

    def check_skipped(self) -> None:
        """End a run that goes nowhere. Local, with the same outcome on every rank.

        Raises:
            TrainingError: More than `run.max_skipped_steps` steps in a row were skipped.
        """
        if self._skipped_in_a_row > self._config.run.max_skipped_steps:
            raise TrainingError(
                f"step {self._done}: the gradient was not finite in {self._skipped_in_a_row} steps in a row, more than "
                f"run.max_skipped_steps ({self._config.run.max_skipped_steps}): lower optim.learning_rate or look at "
                "the data"
            )


def _open_run(run_dir: Path, config: Config) -> None:
    terminal_width()  # a wrong ODC_MPI_PROGRESS shows here
    open_run_directory(run_dir, dump(config))


def _metrics(
    step: int,
    minibatch: Minibatch,
    totals: sharded.Minibatch,
    norm: float | None,
    learning_rate: float,
    step_s: float,
    finite: bool,
) -> StepMetrics:
    busy_s, microbatches = totals.per_rank("busy_s"), totals.per_rank("microbatches")
    slowest_s = float(busy_s.max())
    return StepMetrics(
        step=step,
        loss=totals.total("loss"),
        grad_norm=norm,
        learning_rate=learning_rate,
        num_tokens=minibatch.num_tokens,
        num_input_tokens=minibatch.num_input_tokens,
        step_s=step_s,
        tokens_per_s=minibatch.num_input_tokens / step_s,
        idle_fraction=1.0 - float(busy_s.mean()) / slowest_s if slowest_s > 0 else 0.0,
        microbatches_min=int(microbatches.min()),
        microbatches_max=int(microbatches.max()),
        slowest_rank=int(busy_s.argmax()),
        skipped=not finite,
        fetch_wait_s=float(totals.per_rank("fetch_s").mean()),
        accumulate_wait_s=float(totals.per_rank("accumulate_s").mean()),
        boundary_wait_s=slowest_s - float(busy_s.mean()),
    )


def _optimizer(config: OptimConfig, model: sharded.ShardedModel) -> torch.optim.Optimizer:
    settings: dict[str, dict[str, Any]] = {
        "adamw": {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon},
        "sgd": {"momentum": config.momentum},
    }
    return build_optimizer(
        config.optimizer,
        model.named_shard_parameters(),
        model.parameter_shapes(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        **settings[config.optimizer],
    )


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
