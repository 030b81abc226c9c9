"""Trainings and transports of `faulty_ranks.py`.

A training goes wrong in microbatch 2 of the third minibatch. Ranks at fault never call MPI again for a minute, unless
the program says otherwise.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from faulty_ranks import fail, leave, sleep
from mpi4py import MPI

import odc_mpi
from odc_mpi.comm.context_parallel.kv_exchange import WindowKVExchange
from odc_mpi.comm.context_parallel.kv_windows import KVSizes, KVWindows
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.transport import ShardStorage
from odc_mpi.comm.windows.node_cache import NodeCache
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.shard.model import ShardedModel


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.fault = None

    def forward(self, x):
        x = self.linear(x)
        if self.fault:
            self.fault()
        return x


BLOCKS = [Block() for _ in range(3)]
MODULE = torch.nn.Sequential(*BLOCKS, torch.nn.Linear(8, 1))


def train(world, fault=None, model=None, between=lambda step: None, at=1):
    """Train without end; rank `at` has the fault, or what is done between the points A and B has."""
    model = model or odc_mpi.shard_model(MODULE, world, units=[Block])
    for step in range(10**9):
        if step == 2:
            print("training", flush=True)
        with model.minibatch():
            for microbatch in (1, 2, 3):
                BLOCKS[1].fault = fault if (world.rank, step, microbatch) == (at, 2, 2) else None
                model(torch.randn(2, 8)).mean().backward()
        between(step)
        model.publish()


def goes_on(world):
    train(world)


def sleeps(world):
    train(world, sleep)


def leaves(world):
    world.timeout_s = 40
    train(world, leave)


def is_killed(world):
    train(world, lambda: os.kill(os.getpid(), signal.SIGKILL), at=world.size - 1)


def computes_between_a_and_b(world):
    def between(step):
        end = time.monotonic() + 60
        while step == 2 and world.rank == 1 and time.monotonic() < end:
            sum(range(1000))

    train(world, between=between)


def sleeps_on_an_island(world):
    train(world, sleep, odc_mpi.shard_model(MODULE, world, units=[Block], islands=odc_mpi.Islands(world, 2)))


def sleeps_before_a_merge(world):
    """Islands merge after the third minibatch. Rank 3 waits for rank 1's difference, the others for both."""
    islands = odc_mpi.Islands(world, 2)
    model = odc_mpi.shard_model(MODULE, islands.island, units=[Block])
    loop = odc_mpi.DiLoCo(islands, model, sync_every=3)

    def between(step):
        if (world.rank, step) == (1, 2):
            sleep()
        loop.step(1)

    train(world, None, model, between)


def sleeps_in_a_chunk(world):
    """Rank 1 has the first of two chunks, rank 0 the second."""
    windows = KVWindows(world, KVSizes(3, 64, 4, 4), shared=True)
    if world.rank == 2:
        sleep()
    with WindowKVExchange(windows, 1, (0, 4, 8), (1, 0), "sequence 7") as exchange:
        for layer in range(3):
            if (world.rank, layer) == (1, 2):
                world.set_status("forward of unit layers.2", 1)
                sleep()
            exchange.publish_kv(layer, tuple(torch.randn(2, 1, 1, 4, 8)))
            list(exchange.earlier_kv(layer))


def never_frees_its_tickets(world):
    tickets = odc_mpi.Tickets(world)
    if world.rank == 1:
        sleep()
    tickets.close()


def hangs(world, kind):
    """On one node every fetch and push completes, so here rank 1 waits for one that does not."""
    transport = window_transport(world, comm=odc_mpi.CommConfig(zero_copy="off"))

    class Hanging(ShardStorage):
        def allocate(self):
            parameters, gradients = transport.parameters, transport.gradients
            store, name, place, flush = {
                "fetch": (parameters, "start_gets", parameters._window, "flush"),
                "push": (gradients, "push", gradients, "_flush_local"),
            }[kind]
            started, start = [], getattr(store, name)

            def hanging(index, *arguments):
                started.append(index)
                if world.rank == 1 and started.count(len(parameters.layouts) - 1) == 4:
                    setattr(place, flush, sleep)
                return start(index, *arguments)

            setattr(store, name, hanging)

    world.timeout_s = world.timeout_s if world.rank == 1 else 60
    transport.storages += (Hanging(),)
    train(world, None, ShardedModel(MODULE, transport, units=[Block]))


def fetches_for_its_node(world, end):
    """Ranks 0 and 1 are on one node, for which rank 1 has begun to fetch when it sleeps or dies."""

    class Pairs(MPI.Intracomm):
        def Split_type(self, kind, key=0, info=None):  # noqa: N802 - mpi4py's
            return self.Split(self.rank // 2)

    claimed, finish = Path("claimed"), NodeCache._finish

    def claim(self, index, *arguments):
        if world.rank == 1 and self.layouts[index].name == "2":
            claimed.touch()
            sleep() if end == "sleeps" else os.kill(os.getpid(), signal.SIGKILL)
        finish(self, index, *arguments)

    NodeCache._finish = claim
    nodes = odc_mpi.World(Pairs(world.comm), job=world.job)
    comm = odc_mpi.CommConfig(progress="thread")
    model = ShardedModel(MODULE, window_transport(nodes, comm=comm), units=[Block])
    world.timeout_s = world.timeout_s if world.rank == 0 else 60
    with model.minibatch():
        while world.rank == 0 and not claimed.exists():
            time.sleep(0.01)
        model(torch.randn(2, 8))


def never_answers(world):
    """Never take what lies in its mailbox."""
    transport = window_transport(world, comm=odc_mpi.CommConfig(reduction="mailbox", mailbox_bytes=1000))
    transport.allocate([FlatLayout.build("layers.3", [ParameterSpec("weight", (10_000,), True)], world.size)])
    if world.rank == 1:
        sleep()
    transport.gradients.push(0, torch.ones(10_000)).wait()


def fetches_ahead(world, code="0"):
    """Fail, or leave if there is one rank, while a unit is fetched ahead."""
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    copies = odc_mpi.CommConfig(zero_copy="off")  # else there is nothing to fetch ahead
    model = odc_mpi.shard_model(torch.nn.Sequential(*layers), world, units=layers, comm=copies)
    for _ in range(2):
        with model.minibatch():
            model(torch.randn(8, 64)).mean().backward()
        model.publish()
    fetch = WindowParameters.start_fetch
    WindowParameters.start_fetch = lambda self, *arguments: (time.sleep(0.5), fetch(self, *arguments))[1]
    with model.minibatch():
        model.module[0](torch.randn(8, 64))
        assert "fetching" in [unit.state.value for unit in model.units]
        if world.rank == 1:
            fail()
        if world.size == 1:
            sys.exit(int(code))
    model.publish()


def leaves_out_a_point(world):
    model = odc_mpi.shard_model(torch.nn.Linear(4, 4), world)
    for step in range(3):
        with model.minibatch("loss"):
            model(torch.ones(1, 4)).sum().backward()
        if world.rank == 0:
            model.clip_grad_norm_(1.0)
        model.publish()
        print("passed", step)


def is_late_on_its_host(world):
    model = odc_mpi.shard_model(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), world)
    world.timeout_s = 3
    with model.minibatch():
        loss = model(torch.randn(8, 64)).mean()
        if world.node == 1:
            sleep()
        loss.backward()
    model.publish()
