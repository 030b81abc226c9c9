"""A row of the matrix of trainings, and circumstances in which a row trains."""

import functools
import random
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from grpo_job import make_settings
from late_device import LateDevice
from plain_objectives import OBJECTIVES
from pretended_nodes import on_nodes_of_three, on_pretended_nodes
from small_training import configure
from test_device_training import pose_as_device

from odc_mpi import api
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.data import loader
from odc_mpi.data.plan import balance
from odc_mpi.data.plan.balance import Plan, SequenceSplit, dynamic
from odc_mpi.data.plan.context_parallel import even_bounds
from odc_mpi.models import compiled, families, token_logps
from odc_mpi.training import run as training_run
from odc_mpi.training import source
from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.recipes.sft.objective import SFTObjective


@dataclass(frozen=True)
class Case:
    """A training on all ranks that has to agree with a reference: plain torch, peft, or the run of one rank.

    Attributes:
        settings: Settings of the run, with `__` in place of dots.
        objective: Name of the objective, whose data and further settings it determines.
        freeze: Parts of the names of frozen parameters.
        using: Functions of the circumstances, `At`, that arrange them.
        way: For bits that have to be equal to those of one rank: settings that the run on one rank does not have.
        like: Settings of the reference run: another run on all ranks, in place of plain torch.
        evaluates: Whether it also evaluates, at the start and the end, and saves.
        num_trained: Number of trained parameters of the reference.
        microbatches: Whether peft computes the same microbatches, instead of one sequence at a time.
        loss, close: Relative tolerance of losses; relative and absolute ones of parameters, or None: not compared.
        then: Functions of `At` and the metrics of steps that check what is special.
    """

    settings: dict[str, Any]
    objective: str = "sft"
    freeze: tuple[str, ...] = ()
    using: tuple[Any, ...] = ()
    way: dict[str, Any] | None = None
    like: dict[str, Any] | None = None
    evaluates: bool = False
    num_trained: int | None = None
    microbatches: bool = False
    loss: float = 1e-5
    close: tuple[float, float] | None = (1e-5, 1e-7)
    then: tuple[Any, ...] = ()

    def configure(self, data, run_dir, **changes):
        """Return the configuration of a run, with more changes, over the file `data`."""
        settings = dict(OBJECTIVES[self.objective].settings)
        changes = {key.replace("__", "."): value for key, value in (self.settings | changes).items()}
        if self.objective == "grpo":
            if "run.eval_every" in changes:
                settings |= {"data.eval_path": data / "prompts.jsonl", "data.eval_sequences": 5}
            return make_settings(data, **settings | {"run.dir": run_dir} | changes)
        if self.objective != "sft":
            settings |= {"optim.warmup_steps": 0, "run.dir": run_dir}
        if self.evaluates or self.way is not None:
            settings |= {"data.eval_path": data.with_suffix(".eval.h5"), "run.dir": run_dir}
        if self.evaluates:
            settings |= {"run.eval_on_start": True}
        return configure(data, **settings | changes)


def row(name, *sizes, marks=(), **fields):
    """A row that runs on some numbers of ranks. What is no field of `Case` is a setting."""
    own = {key: fields.pop(key) for key in Case.__dataclass_fields__ if key in fields}
    return pytest.param(Case(fields, **own), id=name, marks=[pytest.mark.sizes(*sizes), *marks])


@dataclass
class At:
    """The circumstances of a training."""

    world: Any
    monkeypatch: pytest.MonkeyPatch
    path: Any  # of this rank alone
    shared: Any
    device: LateDevice | None = None
    inputs: Any = None
    close: list[Any] = field(default_factory=list)


def unpacked(at):
    """The model does not pack, and takes several sequences of a microbatch in padded rows."""
    at.monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")


def long_padding(at):
    """Microbatches that are not packed have rows of all lengths."""
    at.monkeypatch.setattr(balance, "ROWS_PER_RANK", 1)
    at.monkeypatch.setattr(balance, "MIN_ROW_SHARE", 0)


def several_rows(at, lines):
    """Check that microbatches of a model that does not pack had several sequences."""
    num_microbatches = sum(line["microbatches_max"] for line in lines) * at.world.size
    assert not at.inputs.model.packing.packs and num_microbatches < 7 * len(lines)


def small_blocks(at):
    """Log-probabilities are computed in blocks of three, of which ranks need different numbers."""
    at.monkeypatch.setitem(token_logps.MAX_ELEMENTS, "cpu", 3 * 64)


def nodes_of_two(at):
    at.world = on_pretended_nodes(at.world)
    at.close.append(at.world)


def nodes_of_three(at):
    """One of two islands of two ranks spans both nodes."""
    at.world = on_nodes_of_three(at.world, at.monkeypatch)
    at.close.append(at.world)
    islands = Islands(at.world, 2)
    assert islands.island.num_nodes == 1 + islands.index
    islands.close()


def without_kernels(at):
    """As inductor traces and saves, without its kernels, which take a minute to make."""
    at.monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def unmapped_device(at):
    at.device = pose_as_device(at.monkeypatch, at.path)


def mapped_device(at):
    """Host memory in place of a GPU that the other ranks of the node map; its copies are late."""
    at.device = LateDevice()
    for module in (api, training_run):
        at.monkeypatch.setattr(module, "find_device", lambda kind, local_rank: at.device)


def slow_attention(at):
    slow = _late(source.context_parallel_attention, lambda: 0.01 * (at.world.rank == 1))
    at.monkeypatch.setattr(source, "context_parallel_attention", slow)


def slow_microbatches(at):
    """Rank 1 takes a while for each microbatch, so that rank 0 draws most of them."""
    slow = _late(SFTObjective.on_microbatch_end, lambda: 0.03 * at.world.rank)
    at.monkeypatch.setattr(SFTObjective, "on_microbatch_end", slow)


def _late(work, delay):
    def late(*arguments):
        time.sleep(delay())
        return work(*arguments)

    return late


def slow_rollouts(at):
    """Ranks generate and train at speeds of their own."""
    draws = random.Random(at.world.rank)
    for kind, name, delays in (
        (GRPOObjective, "on_microbatch_end", [0, 0.002, 0.02]),
        (RolloutSource, "_report_token", [0, 0.002, 0.01]),
    ):
        at.monkeypatch.setattr(kind, name, _late(getattr(kind, name), lambda delays=delays: draws.choice(delays)))


def splits(count):
    """The two longest sequences of each minibatch are split over some ranks."""

    def arrange(at):
        at.monkeypatch.setattr(loader, "split_longest", functools.partial(_split_longest, count))

    return arrange


def _split_longest(count, lengths, size, max_tokens, cost):
    """Split the two longest sequences of a minibatch over overlapping ranks; the others are drawn."""
    count = min(count, size)
    if count == 1:
        return dynamic(lengths, size, max_tokens, cost)
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[:2]
    parts = []
    for turn, i in enumerate(longest):
        bounds = even_bounds(int(lengths[i]), count, max_tokens, cost)
        ranks = [(turn + k) % size for k in range(len(bounds) - 1)]
        parts.append(SequenceSplit(i, bounds, tuple(ranks if turn else reversed(ranks))))
    rest = [i for i in range(len(lengths)) if i not in longest]
    plan = dynamic(lengths[rest], size, max_tokens, cost)
    return Plan(plan.microbatches, tuple(tuple(rest[k] for k in indices) for indices in plan.pool), tuple(parts))


def splits_at_least(count):
    """Check that so many sequences were split."""

    def check(at, lines):
        found = sum(line.get("num_cut_sequences", 0) for line in lines)
        assert found >= count if count else found == 0

    return check


def stays_whole(at, lines):
    """Sequences of a model without context parallelism are not split."""
    splits_at_least(0)(at, lines)
    assert "a window of 8 tokens" in at.inputs.context_parallel


def compiles(at, lines):
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def copies_own_parts(additions):
    """Check that the device copied the own parts of what was fetched, and whether it added gradients."""

    def check(at, lines):
        counts = at.world.gather_objects((at.device.copies, at.device.additions))
        assert sum(copies for copies, _ in counts) > 3 * len(lines)
        assert (sum(added for _, added in counts) > 0) == additions

    return check


def moves_nothing(at, lines):
    assert at.world.gather_objects((at.device.copies, at.device.additions)) == [(0, 0)] * at.world.size


def copies_peers(at, lines):
    assert at.device.copies > 5 * len(lines) and not at.device._mapped and not any(at.device._in_flight.values())


def copied(at, lines):
    assert at.device.copies and not at.device.unfinished


def fetches_base(expected):
    """Check whether bytes of the frozen base came from other nodes."""

    def check(at, lines):
        found = sum(line["bytes_fetched_other_nodes"] for line in lines)
        trained = sum(p.numel() for p in at.inputs.model.module.parameters() if p.requires_grad)
        # A rank fetches the trained parameters for the forward and the backward pass of each microbatch at most.
        most = sum(4 * trained * 2 * line["microbatches_max"] for line in lines)
        assert (found > most) == expected, (found, most)
        assert found > 0 or at.world.num_nodes == 1

    return check


def one_microbatch(at, lines):
    """Some ranks have no microbatch at all; nothing is lost and no rank hangs."""
    fewest = 1 if at.world.size == 1 else 0
    assert all((line["microbatches_min"], line["microbatches_max"]) == (fewest, 1) for line in lines)
