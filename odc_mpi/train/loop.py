"""A training run: the parts put together, and the loop.

set up    collective: all ranks agree on configuration, data, model and checkpoint, and allocate windows
step      one minibatch: microbatches (one-sided), A, N if gradients are clipped, optimizer (local), B
save      local, where it is due: see `train.saving`
finish    collective: the last checkpoint is waited for, every rank's totals are gathered
"""

import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from odc_mpi.api import decide_for, shard_model
from odc_mpi.checkpoint.state import TrainingState
from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.loader import Batch, Minibatch
from odc_mpi.data.plan.fitted import ROW_LENGTH, FittedCost
from odc_mpi.errors import StoppedError, TrainingError
from odc_mpi.observe.log import Log
from odc_mpi.observe.metrics import StepMetrics
from odc_mpi.observe.trace import Trace
from odc_mpi.runtime.allocation import describe, slurm_job
from odc_mpi.runtime.world import World
from odc_mpi.shard import model as sharded
from odc_mpi.train.inputs import Inputs, open_inputs, remove_staged
from odc_mpi.train.optimizer import make_optimizer, set_learning_rate
from odc_mpi.train.owner import Owner
from odc_mpi.train.resume import Origin, anew_line, find_origin, open_run, say_complete
from odc_mpi.train.saving import NAMES, Saving, about_run
from odc_mpi.train.settings import Config, dump
from odc_mpi.train.stop import StopWish

#: What every rank tells the others at point A: its part of the loss, seconds, what it ran ...
_TOLD = ("loss", "busy_s", "fetch_s", "accumulate_s", "microbatches")
#: ... and what it learned of the cost, where that is fitted.
_TOLD_OF_COST = tuple(f"cost_{i}" for i in range(ROW_LENGTH))


def train(config: Config, world: World, stop: StopWish | None = None) -> dict[str, Any]:
    """Run a configuration from the first step to the last. Collective.

    Args:
        config: As `config.load` returns it.
        world: The ranks.
        stop: Whether this rank was asked to stop, heard from the start of the program on; None: from here on.

    Returns:
        The summary, the same on every rank but for times.

    Raises:
        AgreedError: Settings, data and model do not fit together, or not all ranks see the same; raised on every rank
            before anything is written.
        TrainingError: Too many steps in a row had gradients that are not finite, or the last checkpoint could not be
            written; raised on every rank.
        StoppedError: The run was asked to stop, and has saved what it did; raised on every rank.
    """
    if stop is None:
        with StopWish() as stop:
            return train(config, world, stop)
    world.timeout_s = config.comm.timeout_s
    cores = world.cores_per_rank()
    if config.run.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.run.threads or cores)
    world.require_same(dump(config), "the configuration")
    inputs = world.agree(lambda: open_inputs(config, world.rank, world.size))
    world.require_same(inputs.dataset.digest(), f"data.path: {config.data.path}")
    if world.local_rank == 0:
        remove_staged(config.data.path)
    _check_stop(stop, world)
    origin = find_origin(config, world, inputs)
    if origin and origin.step >= config.run.steps:
        return say_complete(origin, config, world)
    digest = inputs.dataset.digest()
    trainer = Trainer(config, world, inputs, origin)
    del inputs  # the weights that it can read have been read
    run_dir = Path(config.run.dir)
    beginning = f"\nresuming {origin.one_line(config)}" if origin else anew_line(config)
    _check_stop(stop, world)
    # Not earlier: whatever is wrong has to be found before anything is written.
    owner = world.agree(lambda: open_run(run_dir, config, origin) if world.rank == 0 else None)
    opening = f"{world.mpi_library}, ranks {world.size}, nodes {world.num_nodes}: {trainer.decision.one_line()}"
    if trainer.decision.reduction.choice == "mailbox":
        opening += f"; mailbox of {config.comm.mailbox_bytes >> 10:,} KiB per rank at most"
    opening += f"\n{describe(world.layout, slurm_job())}{beginning}"
    log = Log(run_dir, config.run.steps, opening, speaks=world.rank == 0)
    with trainer, owner or nullcontext(), log:
        about = about_run(config, trainer.model.module, digest, origin.path if origin else None)
        saving = trainer.save(stop, about, owner)
        _run_steps(config, trainer, saving, log)
        # First: whatever becomes of the rest, the last checkpoint is not to be lost.
        checkpoints = saving.finish()
        trainer.trace.write(world, run_dir)
        summary = log.finish(trainer.facts() | checkpoints)
        saving.check_end(trainer.done)
        return summary


def _run_steps(config: Config, trainer: "Trainer", saving: Saving, log: Log) -> None:
    """Train until the last step, or until a rank was asked to stop. Collective, at the ordering points only."""
    while trainer.done < config.run.steps and not saving.stopping:
        log.step(trainer.step())
        try:
            trainer.check_skipped()
        except TrainingError:
            saving.finish()  # what is written and not yet published would be lost
            raise
        saving.after_step(trainer.done)


def _check_stop(stop: StopWish, world: World) -> None:
    """End a run that was asked to stop while it started, as long as nothing is written. Collective."""
    stop.look()
    if any(world.gather_objects(stop.told)):
        raise StoppedError("stopped as asked before the first step: start again to go on")


class Trainer:
    """The model, its optimizer and the step; leaving it as a context closes the data set. Making one is collective.

    Args:
        config: Of the run.
        world: The ranks.
        inputs: What `open_inputs` returned.
        origin: The checkpoint to begin at; it is closed.

    Attributes:
        done: Steps that are done, those before the checkpoint included.
        trace: When this rank did what in the last minibatches.
    """

    def __init__(self, config: Config, world: World, inputs: Inputs, origin: Origin | None = None) -> None:
        self._config = config
        self._world = world
        self._dataset = inputs.dataset
        self._loader = inputs.loader
        self._fitted = FittedCost(self._loader.cost) if config.data.cost == "fitted" else None
        self.done = self._first = origin.step if origin else 0
        self._saving: Saving | None = None
        self._skipped_in_a_row = 0
        comm = config.comm
        self.decision = decide_for(
            world,
            transport=comm.transport,
            zero_copy=comm.zero_copy,
            reduction=comm.reduction,
            progress=comm.progress,
            window_device=comm.window_device,
            device=config.run.device,
            tickets=config.data.balance == "dynamic",
        )
        self.model = shard_model(
            inputs.model.module,
            world,
            param_dtype=getattr(torch, config.model.param_dtype),
            reduce_dtype=getattr(torch, config.model.reduce_dtype),
            activation_checkpointing=config.model.gradient_checkpointing,
            prefetch=config.comm.prefetch,
            weights=origin.weights if origin else inputs.model.weights,
            decision=self.decision,
            mailbox_bytes=comm.mailbox_bytes,
            device=config.run.device,
            optimizer_device=config.optim.device,
        ).train()
        if origin:
            world.agree(origin.weights.require_intact)
        self.trace = Trace(self.model.spans, config.run.trace_steps, config.data.max_tokens_per_microbatch)
        self._tickets = Tickets(world) if config.data.balance == "dynamic" else None
        # With collectives ranks wait for the slowest in each fetch and push, not at A.
        self._waits_apart = self.decision.transport == "window"
        self._start_collectives = self.model.num_collectives
        self.optimizer = make_optimizer(
            config.optim, self.model.named_shard_parameters(), self.model.parameter_shapes()
        )
        self._state = TrainingState(self.model, self.optimizer, world.rank)
        if origin:
            world.agree(lambda: self._resume(origin))

    def step(self) -> StepMetrics:
        """Train on the next minibatch. Collective, at the ordering points only.

        Returns:
            What happened, the same on every rank but for `step_s` and `tokens_per_s`.
        """
        began = time.perf_counter()
        learning_rate = set_learning_rate(self.optimizer, self._config, self.done)
        minibatch = next(self._loader)
        totals = self._run_microbatches(minibatch)
        max_norm = self._config.optim.max_grad_norm
        norm = self.model.clip_grad_norm_(max_norm) if max_norm else None
        finite = totals.finite and (norm is None or math.isfinite(norm))
        if finite:
            self.optimizer.step()
        self.model.publish()
        self.done += 1
        self.trace.end_step(self.done, minibatch)
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        step_s = time.perf_counter() - began
        return _metrics(self.done, minibatch, totals, norm, learning_rate, step_s, finite)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self._dataset.close()

    def save(self, stop: StopWish, about: dict[str, Any], owner: Owner | None) -> Saving:
        """Begin to save, as the configuration says. Collective.

        Args:
            stop: Whether this rank was asked to stop.
            about: What checkpoints tell of the run besides its state.
            owner: Of the run directory, on rank 0.
        """

        def about_now() -> dict[str, Any]:
            return {**about, **self._progress()}

        self._saving = Saving(self._config, self._world, self._state, about_now, stop, owner)
        return self._saving

    def facts(self) -> dict[str, Any]:
        """Return what the summary tells besides the steps. Collective."""
        model, steps = self.model, max(1, self.done - self._first)
        own = [model.peak_parameter_bytes, model.fetch_wait_s, model.accumulate_wait_s, model.boundary_wait_s]
        everyone = np.array(self._world.gather_objects(own))
        fetch_s, accumulate_s, boundary_s = (float(seconds) for seconds in everyone[:, 1:].mean(axis=0))
        return {
            "world_size": self._world.size,
            "num_nodes": self._world.num_nodes,
            "hosts": [host for host, _ in self._world.layout],
            "ranks_per_node": [count for _, count in self._world.layout],
            **slurm_job(),
            "transport": self._config.comm.transport,
            "reduction": self.decision.reduction.choice,
            "balance": self._config.data.balance,
            "zero_copy": self.decision.zero_copy.choice,
            "progress": self.decision.progress.choice,
            "window_device": made.choice if (made := self.decision.window_device) else "cpu",
            "param_dtype": self._config.model.param_dtype,
            "device": str(model.device),
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
        names = (*_TOLD, *(_TOLD_OF_COST if self._fitted else ()), *(NAMES if self._saving else ()))
        with model.minibatch(*names) as totals:
            began, fetch_s, accumulate_s = self._own_s(), model.fetch_wait_s, model.accumulate_wait_s
            for batch in minibatch.batches(self._tickets.draw) if self._tickets else minibatch:
                with self.trace.microbatch(batch.num_input_tokens):
                    totals.values["loss"] += self._run_microbatch(minibatch, batch)
                totals.values["microbatches"] += 1
            if not self._waits_apart:
                self._pad(minibatch)
            totals.values["fetch_s"] = model.fetch_wait_s - fetch_s
            totals.values["accumulate_s"] = model.accumulate_wait_s - accumulate_s
            totals.values["busy_s"] = self._own_s() - began
            if self._fitted:
                totals.values.update(zip(_TOLD_OF_COST, self._fitted.report().tolist(), strict=True))
            if self._saving:
                self._saving.tell(totals)
        if self._tickets:
            self._tickets.reset()
        if self._fitted:
            self._fitted.update(np.stack([totals.per_rank(name) for name in _TOLD_OF_COST], axis=1))
            self._loader.cost = self._fitted.cost
        if self._saving:
            self._saving.hear(totals)
        return totals

    def _progress(self) -> dict[str, Any]:
        """Return what the next step depends on besides model, optimizer and configuration, as JSON takes it."""
        return {
            "loader": self._loader.state_dict(),
            "cost": self._fitted.state_dict() if self._fitted else None,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def _resume(self, origin: Origin) -> None:
        self._state.restore(origin.checkpoint)
        self._loader.load_state_dict(origin.about["loader"])
        self._skipped_in_a_row = origin.about["skipped_in_a_row"]
        if self._fitted and origin.about["cost"]:
            self._fitted.load_state_dict(origin.about["cost"])
            self._loader.cost = self._fitted.cost
        origin.checkpoint.close()

    def _pad(self, minibatch: Minibatch) -> None:
        """Take part in what other ranks have more microbatches for, and for nothing."""
        for batch in minibatch.padding():
            with self.trace.microbatch(0), self.model.padding():
                self.model(**batch.to(self.model.device).inputs).loss.backward()

    def _run_microbatch(self, minibatch: Minibatch, batch: Batch) -> float:
        # Random numbers belong to the microbatch, not to the rank that happens to run it.
        torch.manual_seed(_seed(self._config.run.seed, minibatch.data_epoch, int(batch.indices[0])))
        began = self._own_s()
        loss = self.model(**batch.to(self.model.device).inputs).loss * (batch.num_tokens / minibatch.num_tokens)
        loss.backward()
        value = loss.item()  # before the clock: on a GPU it waits for what has only been launched
        if self._fitted:
            self._fitted.observe(self._dataset.lengths[batch.indices], self._own_s() - began)
        return value

    def _own_s(self) -> float:
        """A clock of what this rank's work takes, its fetches and pushes included; not of waits for slower ranks."""
        waited_s = 0.0 if self._waits_apart else self.model.fetch_wait_s + self.model.accumulate_wait_s
        return time.perf_counter() - waited_s

    def check_skipped(self) -> None:
        """End a run that goes nowhere. Local, with the same outcome on every rank.

        Raises:
            TrainingError: `run.max_skipped_steps` steps in a row were skipped.
        """
        if self._skipped_in_a_row >= self._config.run.max_skipped_steps:
            raise TrainingError(
                f"step {self.done}: the gradient was not finite in {self._skipped_in_a_row} steps in a row, which is "
                "run.max_skipped_steps: lower optim.learning_rate or look at the data"
            )


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


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
