"""Islands of 1 and 2 ranks train as all ranks together do: the same sums, parameters and bits, with fewer bytes."""

import functools
import time

import pytest
import torch
from units import random_pushes

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.islands.islands import Islands
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.errors import AllRanksUserError

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]

SIZES = [1, 33, 70_000, 1000]
REDUCTIONS = {
    "accumulate": AccumulateGradientStore,
    "mailbox": functools.partial(MailboxGradientStore, mailbox_bytes=20_000),
}


@pytest.fixture(scope="module", params=[1, 2], ids="islands of {}".format)
def islands(world, request):
    if world.size % request.param or world.size == request.param:
        pytest.skip("no islands of this size")
    return Islands(world, request.param)


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS.keys())
@pytest.mark.parametrize("zero_copy", [True, False], ids=["zero-copy", "copies"])
def test_owners_get_the_sums_of_all_islands_and_all_islands_their_parameters(
    world, islands, allocate, reduction, zero_copy
):
    """Some rounds, each with a rank that comes late, and parameters that depend on the sums."""
    progress = reduction is not AccumulateGradientStore
    transport = window_transport(world, zero_copy=zero_copy, reduction=reduction, islands=islands, progress=progress)
    allocate(transport, SIZES)
    layouts = [FlatLayout.build("unit", [ParameterSpec("p", (n,), True)], world.size, islands.size) for n in SIZES]
    owned = [layout.owned(world.rank) for layout in layouts]
    for number in range(4):
        time.sleep(0.02 * (world.rank == number % world.size))
        for index, start, values in random_pushes(SIZES, world.rank, number):
            transport.gradients.record_event(gradient := values.float())
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


def test_each_element_has_one_owner(world):
    for num_islands in (k for k in range(1, world.size + 1) if world.size % k == 0):
        layout = FlatLayout.build("unit", [ParameterSpec("p", (1000,), True)], world.size, num_islands)
        ranges = sorted(layout.owned(rank) for rank in range(world.size))
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])] and ranges[-1][1] == 1000


@pytest.mark.sizes(3)
def test_ranks_that_do_not_divide_are_refused(world):
    with pytest.raises(AllRanksUserError, match=r"^islands.by: expected node or a divisor of .* 3, got 2$"):
        Islands(world, 2)
