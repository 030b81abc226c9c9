"""Islands of 1 and 2 ranks train as all ranks together do: the same sums, parameters and bits, with fewer bytes."""

import copy
import time
from dataclasses import replace

import pytest
import torch
from mpi4py import MPI
from pretended_nodes import on_pretended_nodes
from torch import nn
from torch.utils.checkpoint import checkpoint
from units import Block, random_pushes

from odc_mpi.api import decide_for, shard_model
from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.work import Work
from odc_mpi.errors import AllRanksUserError
from odc_mpi.probe.decision import Choice
from odc_mpi.runtime.world import World
from odc_mpi.shard.cache_budget import CacheBytes
from odc_mpi.shard.model import ShardedModel

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]

SIZES = [1, 33, 70_000, 1000]
REDUCTIONS = {"accumulate": {}, "mailbox": {"reduction": "mailbox", "mailbox_bytes": 20_000, "progress": "thread"}}


@pytest.fixture(params=[1, 2], ids="islands of {}".format)
def islands(world, request):
    if world.size % request.param or world.size == request.param:
        pytest.skip("no islands of this size")
    return Islands(world, request.param)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("zero_copy", ["auto", "off"], ids=["zero-copy", "copies"])
def test_owners_get_the_sums_of_all_islands_and_all_islands_their_parameters(
    world, islands, allocate, late_windows, reduction, zero_copy
):
    """Some rounds, each with a rank that comes late, and parameters that depend on the sums."""
    comm = CommConfig(zero_copy=zero_copy, **REDUCTIONS[reduction])
    transport = window_transport(world, comm=comm, islands=islands)
    allocate(transport, SIZES)
    owned = [layout_of(numel, world, islands).owned(world.rank) for numel in SIZES]
    for number in range(4):
        time.sleep(0.02 * (world.rank == number % world.size))
        for index, start, values in random_pushes(SIZES, world.rank, number):
            transport.gradients.prepare_push(gradient := values.float())
            transport.gradients.push(index, gradient, start).wait()
        transport.complete_gradients(torch.zeros(1).numpy())
        sums = [torch.zeros(numel) for numel in SIZES]
        for rank in range(world.size):
            for index, start, values in random_pushes(SIZES, rank, number):
                sums[index][start : start + len(values)] += values
        for index, (start, stop) in enumerate(owned):
            shard = transport.gradient_shard(index)
            assert torch.equal(shard[: stop - start], sums[index][start:stop])
            assert not shard[stop - start :].any(), "padding was written to"
            transport.parameter_shard(index)[: stop - start] = shard[: stop - start] / 2
            shard.zero_()
        transport.publish_parameters()
        for index, numel in enumerate(SIZES):
            fetched = transport.parameters.fetch(index).wait()
            assert torch.equal(fetched, sums[index] / 2), (index, numel)
            transport.parameters.release(fetched)


def test_an_array_that_an_island_has_finished_reaches_its_owners_before_the_others(world, islands, allocate):
    transport = allocate(window_transport(world, islands=islands), [100, 5000])
    start, stop = layout_of(5000, world, islands).owned(world.rank)
    numel = stop - start
    for number in range(1, 4):
        for index, size in enumerate((100, 5000)):
            transport.gradients.push(index, torch.full((size,), float(number))).wait()
        transport.finish_arrays([1])
        if islands.island.rank == 0:
            time.sleep(0.02)
        islands.island.gather_objects(None)
        transport.finish_arrays([])  # all ranks have seen that all have finished
        world.gather_objects(None)
        finished, other = (transport.gradient_shard(index).clone() for index in (1, 0))
        world.gather_objects(None)
        assert (finished[:numel] == number * world.size).all() and not other.any()
        transport.complete_gradients(torch.zeros(1).numpy())
        for index in range(2):
            transport.gradient_shard(index).zero_()
        transport.publish_parameters()


def layout_of(numel, world, islands):
    return FlatLayout.build("unit", [ParameterSpec("p", (numel,), True)], world.size, islands.size)


class Repeated(nn.Module):
    """Uses two blocks twice, once in a checkpoint that runs them again in the backward, and a weight by itself."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 4)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](x))
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = x + x @ self.blocks[2].linear.weight
        return self.head(self.blocks[2](x))


@pytest.mark.parametrize("activation_checkpointing", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
def test_units_that_are_used_several_times_give_the_sums_of_plain_torch(
    world, islands, reentrant, activation_checkpointing
):
    torch.manual_seed(5)
    module = Repeated(reentrant).double()
    plain = copy.deepcopy(module)
    transport = window_transport(world, torch.float64, torch.float64, islands=islands)
    model = ShardedModel(
        module, transport, units=[Block], prefetch=1, activation_checkpointing=activation_checkpointing
    )
    model.cache_bytes = CacheBytes(0, 1 << 20)
    for step in range(3):
        count = 1 + step % 2
        inputs = torch.randn(world.size, count, 3, 16, generator=torch.Generator().manual_seed(step)).double()
        plain.zero_grad()
        plain(inputs.flatten(0, 2)).square().sum().backward()
        with model.minibatch():
            for microbatch in range(count):
                if microbatch == count - 1:
                    model.set_is_last_backward()
                    time.sleep(0.02 * (world.rank == step % world.size))
                model(inputs[world.rank, microbatch]).square().sum().backward()
        parameters = dict(plain.named_parameters())
        for tensor_slice, (name, parameter) in zip(
            [each for each, _ in model.slices()], model.named_shard_parameters(), strict=True
        ):
            wanted = parameters[name].grad.flatten()[tensor_slice.start : tensor_slice.stop]
            if parameter.numel():
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-10)
        model.publish()
    model.close()


def test_a_backward_after_the_last_one_is_refused(world, islands):
    model = ShardedModel(Block(), window_transport(world, islands=islands), prefetch=1)
    message = "expected no backward after the one announced by set_is_last_backward.*, got gradients of unit"
    with pytest.raises(RuntimeError, match=message), model.minibatch():
        model.set_is_last_backward()
        for _ in range(2):
            model(torch.randn(2, 16)).sum().backward()
    world.gather_objects(None)
    with pytest.raises(RuntimeError):
        model.publish()


def test_an_error_in_the_push_thread_is_raised_at_the_end_of_the_minibatch(world, islands, monkeypatch):
    module = nn.Sequential(Block(), Block())
    model = ShardedModel(module, window_transport(world, islands=islands), units=[Block], prefetch=1)
    results = iter([ValueError("the first call")])

    def finish(indices):
        for error in results:
            raise error
        return Work()

    monkeypatch.setattr(model._pusher, "_finish_arrays", finish)
    with pytest.raises(ValueError, match="the first call"), model.minibatch():
        model.set_is_last_backward()
        model(torch.randn(2, 16)).sum().backward()
    world.gather_objects(None)


def test_islands_serve_one_model(world, islands):
    shard_model(Block(), world, islands=islands).close()
    with pytest.raises(ValueError, match="islands: expected new islands for each model"):
        shard_model(Block(), world, islands=islands)


def test_windows_on_gpus_are_refused_by_all_ranks_together(world, islands):
    on_gpus = replace(decide_for(world), window_device=Choice("cuda", ""))
    with pytest.raises(AllRanksUserError, match=r"^islands: expected windows in host memory"):
        shard_model(Block(), world, islands=islands, comm=on_gpus)
    islands.close()


@pytest.mark.sizes(3)
def test_islands_of_unequal_size_are_refused(world):
    with pytest.raises(AllRanksUserError, match=r"^islands.by: expected node or a divisor of 3, .* got 2$"):
        Islands(world, 2)
    with pytest.raises(AllRanksUserError, match=r"^islands.by: expected the same .*: 2, .*: 1: set a number"):
        Islands(on_pretended_nodes(world), "node")


class Alternating(MPI.Intracomm):
    """Ranks 0 and 2 are on one node, 1 and 3 on another."""

    def Split_type(self, kind, key=0, info=None):  # noqa: N802
        return self.Split(self.rank % 2)


@pytest.mark.sizes(4)
def test_nodes_are_islands_if_their_ranks_are_consecutive(world):
    nodes = on_pretended_nodes(world)
    islands = Islands(nodes, "node")
    assert (islands.size, islands.index, islands.island.rank) == (2, *divmod(world.rank, 2))
    assert islands.column_ranks == [world.rank % 2, world.rank % 2 + 2]
    mixed = World(Alternating(world.comm), job=world.job)
    with pytest.raises(
        AllRanksUserError, match=r"expected consecutive ranks on each node, as node requires, got \[0, 2\] on "
    ):
        Islands(mixed, "node")
    mixed.close()
