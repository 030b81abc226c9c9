"""Windows move the right elements: against exact sums, odd sizes, more ranks than elements."""

import numpy as np
import pytest
import torch
from units import (
    assert_fetched,
    assert_pushed,
    assert_reports_and_sums,
    assert_sums,
    random_pushes,
    while_the_last_rank_computes,
    write_parameters,
)

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec, ranges_by_owner
from odc_mpi.comm.reduce import accumulate, mailbox
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.windows import parameters, rma
from odc_mpi.comm.windows.rma import SharedWindow, Window
from odc_mpi.errors import UserError
from odc_mpi.runtime.library import is_mpich

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]

SIZES = [1, 7, 33, 1000, 65_537]


@pytest.fixture(params=[True, False], ids=["zero-copy", "copies"])
def zero_copy(request):
    return request.param


both_reductions = pytest.mark.parametrize("reduction", ["accumulate", "mailbox"])


@pytest.fixture
def make(world, zero_copy, allocate):
    def build(sizes=SIZES, trainable=True, reduction="auto", **dtypes):
        # With less space than the larger pushes need.
        comm = CommConfig(zero_copy="auto" if zero_copy else "off", reduction=reduction, mailbox_bytes=20_000)
        transport = window_transport(world, comm=comm, **dtypes)
        return allocate(transport, sizes, trainable)

    return build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_rank_fetches_what_the_owners_wrote(make, dtype):
    transport = make(param_dtype=dtype, reduce_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(numel, generator=generator).to(dtype) for numel in SIZES]
    write_parameters(transport, values)
    assert_fetched(transport, values)


@both_reductions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pushes_of_all_ranks_add_up_exactly(make, world, dtype, reduction):
    """Integers, so that the sum is exact whatever the order of arrival; each push covers a stretch of its own."""
    transport = make(reduce_dtype=dtype, reduction=reduction)
    for number in range(5):
        for index, start, values in random_pushes(SIZES, world.rank, number):
            transport.gradients.push(index, values.to(dtype), start).wait()
    transport.complete_gradients(np.zeros(1))
    assert_pushed(world, transport, SIZES, range(5))


@both_reductions
def test_long_messages_are_cut(make, world, monkeypatch, reduction):
    monkeypatch.setattr(rma, "MAX_MESSAGE_NUMEL", 100)
    # As with Open MPI on several nodes.
    monkeypatch.setattr(Window, "_max_get_numel", property(lambda _: 7, lambda *_: None), raising=False)
    transport = make([5000], reduction=reduction)
    values = torch.arange(5000, dtype=torch.float32)
    write_parameters(transport, [values])
    assert_fetched(transport, [values])
    transport.gradients.push(0, values).wait()
    transport.complete_gradients(np.zeros(1))
    assert_sums(transport, [values * world.size])


@both_reductions
def test_pushes_that_arrive_with_the_flush_are_there_when_all_ranks_have_flushed(make, world, late_windows, reduction):
    """Also if a rank comes late to its flush; gradients are rewritten as soon as their push allows it."""
    transport = make(reduction=reduction)
    for number in range(4):
        for index, start, values in random_pushes(SIZES, world.rank, number):
            transport.gradients.push(index, gradient := values.float(), start).wait()
            gradient.fill_(torch.nan)
        late_windows.flush_s = 0.01 * (world.rank == number % world.size)
        transport.complete_gradients(np.zeros(1))
        assert_pushed(world, transport, SIZES, [number])
        for index in range(len(SIZES)):
            transport.gradients.shard(index).zero_()
        transport.publish_parameters()


def test_reports_and_sums_reach_everyone(make, world):
    assert_reports_and_sums(world, make())


def test_broadcast_takes_rank_0s(make, world):
    transport = make()
    for dtype in (torch.int64, torch.bfloat16, torch.bool):
        tensor = torch.full((3, 5), world.rank == 0, dtype=dtype)
        transport.group.broadcast(tensor)
        assert torch.equal(tensor, torch.ones(3, 5, dtype=dtype))
    scalar = torch.tensor(world.rank + 1.0)
    transport.group.broadcast(scalar)
    assert scalar == 1.0


@both_reductions
def test_frozen_arrays_have_no_gradient_shard(make, reduction):
    transport = make([100], trainable=False, reduction=reduction)
    with pytest.raises(KeyError):
        transport.gradients.shard(0)


def test_a_zero_copy_fetch_is_the_owners_memory(make, world, zero_copy):
    """A rank of the node sees a store without any fetch; a copy does not change any more."""
    transport = make([1000])
    write_parameters(transport, [torch.zeros(1000)])
    fetched = transport.parameters.fetch(0).wait()
    assert transport.parameters.uses_buffer(0) == (not zero_copy)
    transport.complete_gradients(np.zeros(1))
    write_parameters(transport, [torch.arange(1000.0)])
    assert torch.equal(fetched, torch.arange(1000.0) if zero_copy else torch.zeros(1000))
    transport.parameters.release(fetched)
    assert transport.parameters.buffers.peak_bytes == (0 if zero_copy else 4000)
    transport.complete_gradients(np.zeros(1))


@pytest.mark.mpi(min_size=2)
def test_a_computing_owner_is_not_waited_for(make, world, base):
    """The last rank computes without entering MPI; the others fetch from it and push to it meanwhile."""
    transport = make([100_000 * world.size])
    transport.publish_parameters()

    def fetch_and_push():
        fetched = transport.parameters.fetch(0).wait()
        transport.gradients.push(0, fetched).wait()
        transport.parameters.release(fetched)

    while_the_last_rank_computes(world, base, fetch_and_push)
    transport.complete_gradients(np.zeros(1))


def test_the_number_of_windows_does_not_depend_on_the_model(world, monkeypatch):
    """One for parameters and one for gradients, but several of these where each has one lock for a node."""
    made, init = [], Window.__init__
    monkeypatch.setattr(Window, "__init__", lambda self, *a, **b: (made.append(self), init(self, *a, **b))[1])
    for dtypes in ([torch.float32] * 3, [torch.float32, torch.bfloat16] * 100):
        specs = [ParameterSpec("p", (40,), True, dtype) for dtype in dtypes]
        transport = window_transport(world)
        transport.allocate([FlatLayout.build(f"u{i}", [spec], world.size) for i, spec in enumerate(specs)])
        transport.close()
        assert len(made) == 1 + (world.size if is_mpich(world.mpi_library) else 1)
        made.clear()


@pytest.mark.sizes(2, 3)
def test_of_ranks_that_compare_and_swap_a_word_one_succeeds(world):
    window = SharedWindow(world, 500, torch.int64)
    world.gather_objects(None)
    before = [window.compare_and_swap(0, word, 0, world.rank + 1) for word in range(500)]
    everyone = np.array(world.gather_objects(before))
    assert ((everyone == 0).sum(axis=0) == 1).all(), "a word was swapped by no rank, or by several"
    winner = everyone.argmin(axis=0) + 1
    assert ((everyone == 0) | (everyone == winner)).all()
    with world.collective("freeing a window"):
        window.free()


@pytest.mark.sizes(2)
def test_a_window_is_cleared_before_others_see_it(world, monkeypatch):
    """By the memory barrier of the standard, MPI_Win_sync, before the ranks synchronize."""
    synced, sync = [], Window.sync
    monkeypatch.setattr(Window, "sync", lambda self: (synced.append(self.tensor.clone()), sync(self)))
    for kind in (Window, SharedWindow):
        window = kind(world, 3, torch.int64)
        (values,) = synced
        assert not values.any()
        synced.clear()
        with world.collective("freeing a window"):
            window.free()


@pytest.mark.sizes(2)
def test_windows_whose_owner_does_not_see_what_others_put_are_refused(world, monkeypatch):
    assert world.memory_model == "unified"
    monkeypatch.setattr(rma, "memory_model", lambda win: "separate")
    for kind in (Window, SharedWindow):
        with pytest.raises(UserError, match=r"MPI_WIN_UNIFIED\), got separate ones under .*another MPI"):
            kind(world, 3, torch.int64)


@both_reductions
def test_the_owners_of_an_array_are_determined_once(make, monkeypatch, reduction):
    """Not for every fetch or push, nor for another array of the same size: it takes time for each rank."""
    calls = []

    def counting(*arguments):
        calls.append(arguments)
        return ranges_by_owner(*arguments)

    for module in (parameters, accumulate, mailbox):
        monkeypatch.setattr(module, "ranges_by_owner", counting)
    transport = make([1000, 33, 1000], reduction=reduction)
    monkeypatch.setattr(FlatLayout, "owned", None)  # not called either
    for _ in range(3):
        for index in range(3):
            fetched = transport.parameters.fetch(index).wait()
            transport.gradients.push(index, fetched).wait()
            transport.parameters.release(fetched)
    transport.complete_gradients(np.zeros(1))
    num_stores = 2 if transport.parameters.uses_buffer(0) else 1
    assert len(calls) == 2 * num_stores
