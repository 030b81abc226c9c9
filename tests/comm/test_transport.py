import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rank_threads
import torch
from local_transport import LocalGroup, LocalTransport

from odc_mpi.comm.transport import PARAMETER_DTYPES, REDUCE_DTYPES

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def run(size: int, work: Callable[[LocalTransport], Any], **dtypes: torch.dtype) -> list[Any]:
    return rank_threads.run(size, lambda *rank: LocalTransport(*rank, **dtypes), work)


@SIZES
@pytest.mark.parametrize("param_dtype", PARAMETER_DTYPES)
@pytest.mark.parametrize("reduce_dtype", REDUCE_DTYPES)
def test_shards_begin_as_zeros_of_the_right_kind(
    size: int, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    def work(transport: LocalTransport) -> None:
        for i, layout in enumerate(transport.parameters.layouts):
            for shard, dtype in (
                (transport.parameters.shard(i), param_dtype),
                (transport.gradients.shard(i), reduce_dtype),
            ):
                assert shard.shape == (layout.shard_numel,) and shard.dtype == dtype and not shard.any()
        numel = sum(layout.shard_numel for layout in transport.parameters.layouts)
        assert transport.parameters.shard_bytes == numel * param_dtype.itemsize

    run(size, work, param_dtype=param_dtype, reduce_dtype=reduce_dtype)


@SIZES
def test_a_fetch_brings_every_owner_s_part(size: int) -> None:
    def work(transport: LocalTransport) -> None:
        for i, layout in enumerate(transport.parameters.layouts):
            first, last = layout.owned(transport.group.rank)
            transport.parameters.shard(i).fill_(-1)  # beyond the array's end
            transport.parameters.shard(i)[: last - first] = torch.arange(first, last) + 1000 * i
        transport.publish_parameters()
        for i, layout in enumerate(transport.parameters.layouts):
            array = transport.parameters.fetch(i).wait()
            assert torch.equal(array, (torch.arange(layout.numel) + 1000 * i).float())
            transport.parameters.release(array)
        assert not transport.parameters.buffers._in_use

    run(size, work)


@SIZES
def test_a_push_adds_to_every_owner_s_part(size: int) -> None:
    pushes = rank_threads.draw_pushes(size, range(4))

    def work(transport: LocalTransport) -> list[torch.Tensor]:
        for i, start, gradient in pushes[transport.group.rank]:
            before = gradient.clone()
            transport.gradients.push(i, gradient, start).wait()
            assert torch.equal(gradient, before)
        transport.complete_gradients(np.zeros(1))
        return [transport.gradients.shard(i).clone() for i in range(4)]

    rank_threads.assert_sums(pushes, run(size, work))


@SIZES
def test_pushes_at_the_same_time_lose_nothing(size: int) -> None:
    def work(transport: LocalTransport) -> float:
        ones = torch.ones(transport.parameters.layouts[3].numel)
        for _ in range(100):
            transport.gradients.push(3, ones)
        transport.complete_gradients(np.zeros(1))
        first, last = transport.parameters.layouts[3].owned(transport.group.rank)
        shard = transport.gradients.shard(3)[: last - first]
        assert bool((shard == 100 * size).all())
        return float(shard.sum())

    assert sum(run(size, work)) == 100 * size * 400


@SIZES
def test_reports_reach_all_in_the_order_of_ranks(size: int) -> None:
    def work(transport: LocalTransport) -> None:
        for step in range(20):
            own = np.array([transport.group.rank, step, 0.5])
            reports = transport.complete_gradients(own)
            own[:] = -1  # reports are copies
            np.testing.assert_array_equal(reports, [[rank, step, 0.5] for rank in range(size)])

    run(size, work)


@SIZES
def test_sums_are_the_same_on_every_rank_to_the_last_bit(size: int) -> None:
    values = [0.1, 1e16, -1e16, 0.7][:size]

    def work(transport: LocalTransport) -> bytes:
        return transport.group.norm(np.array([values[transport.group.rank], 1.0])).tobytes()

    sums = run(size, work)
    assert len(set(sums)) == 1
    assert np.frombuffer(sums[0])[1] == size


@SIZES
def test_broadcast_is_rank_0_s(size: int) -> None:
    def work(transport: LocalTransport) -> None:
        for shape in ((), (3, 4), (0,)):
            tensor = torch.full(shape, float(transport.group.rank + 5))
            transport.group.broadcast(tensor)
            assert torch.equal(tensor, torch.full(shape, 5.0))

    run(size, work)


def test_collectives_at_ordering_points_are_counted() -> None:
    def work(transport: LocalTransport) -> int:
        transport.group.broadcast(torch.zeros(1))
        transport.parameters.fetch(0).wait()
        transport.gradients.push(0, torch.ones(3)).wait()
        assert transport.group.num_collectives == 0
        transport.complete_gradients(np.zeros(2))
        transport.group.norm(np.zeros(2))
        transport.publish_parameters()
        return transport.group.num_collectives

    assert run(2, work) == [3, 3]


def test_publishing_waits_for_all() -> None:
    written = [False, False, False]

    def work(transport: LocalTransport) -> None:
        threading.Event().wait(0.05 * transport.group.rank)
        written[transport.group.rank] = True
        transport.publish_parameters()
        assert all(written)

    run(3, work)


def test_closing_twice() -> None:
    def work(transport: LocalTransport) -> None:
        transport.close()
        transport.close()

    run(2, work)


def test_a_lost_rank_ends_the_others() -> None:
    group = LocalGroup(2, timeout_s=0.1)
    with pytest.raises(threading.BrokenBarrierError):
        LocalTransport(group, 0).allocate([])


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_a_param_dtype_that_cannot_travel(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"param_dtype must be one of .*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, param_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_a_reduce_dtype_that_mpi_cannot_add(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"reduce_dtype must be one of .*what MPI can add.*, got {dtype}"):
        LocalTransport(LocalGroup(1), 0, reduce_dtype=dtype)
