import random
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from adversary import Adversary
from parity import squares
from ranks import RecordingTransport, on_ranks, run_ranks
from test_unit import simple, states, value_of
from toy_models import INPUT, Layer, Stack

from odc_mpi.comm.buffers import BufferPool
from odc_mpi.comm.work import Work
from odc_mpi.shard.model import ShardedModel
from odc_mpi.shard.prefetch import CommunicationThread, PrefetchPredictor
from odc_mpi.shard.units.unit import Unit, UnitState
from odc_mpi.shard.units.unsharded import UnshardedUnits

# The order


def follow(order: PrefetchPredictor, uses: str, count: int = 1) -> list[str]:
    """After each use, what is expected next."""
    expected = []
    for unit in uses:
        order.record(unit)
        expected.append("".join(order.predict(count)))
    return expected


def test_a_changed_order_is_learned_again() -> None:
    order = PrefetchPredictor()
    for uses in ("abcd", "abcd", "acbd"):
        order.reset_position()
        follow(order, uses)
    order.reset_position()
    assert follow(order, "acbd") == ["c", "b", "d", ""]
    order.reset_position()
    assert follow(order, "abcd") == ["c", "c", "d", ""], "half of the old order is still known"
    order.reset_position()
    assert follow(order, "abcd") == ["b", "c", "d", ""]


# The thread


def test_no_reference_to_a_buffer_remains_after_its_wait() -> None:
    """Else the pool would now and then take new memory, depending on which thread is faster."""
    pool, thread = BufferPool(), CommunicationThread("t")

    def fill(buffer: torch.Tensor) -> Work:
        return Work(lambda: buffer.__setitem__(..., 1.0))

    for _ in range(2000):
        buffer = pool.acquire(10, torch.float32)
        thread.start(fill, buffer).wait()
        pool.release(buffer)
        del buffer
    assert pool.peak_bytes == 40
    thread.close()


# Units


def unshard(unsharded: UnshardedUnits, units: list[Unit], which: str) -> list[str]:
    """Require units by number, check what they hold, and return the states after each."""
    after = []
    for i in which:
        unit = units[int(i)]
        unsharded.unshard(unit)
        for name, (_, slot) in unit.ranges.items():
            expected = (torch.arange(slot.spec.numel) + value_of(name)).double().view(slot.spec.shape)
            assert torch.equal(unit.parameter(name), expected), f"unit {i} was used before it was there"
        after.append(states(units))
    return after


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [(1, ["ufsss", "uufss", "usufs", "ussuf", "ussuu"]), (2, ["uffss", "uuffs", "usuff", "usuuf", "usuuu"])],
)
@pytest.mark.parametrize("size", [1, 3])
@on_ranks(transport=Adversary)
def test_the_next_units_come_while_this_one_is_used(
    transport: Adversary, size: int, prefetch: int, expected: list[str]
) -> None:
    units, unsharded = simple(transport, 4, prefetch)
    unshard(unsharded, units, "01234")
    unsharded.reshard_all()
    assert states(units) == "sssss"
    transport.log.clear()
    assert unshard(unsharded, units, "01234") == expected
    assert transport.names("fetch") == ["(root)", "u0", "u1", "u2", "u3"]
    unsharded.close()


@pytest.mark.parametrize("prefetch", [1, 2, 3, 10])
@on_ranks(1, transport=Adversary)
def test_any_order_unshards_the_required_units(transport: Adversary, prefetch: int) -> None:
    """Guesses are mostly wrong; never more is held than was promised."""
    transport.delay_s = 0.0
    units, unsharded = simple(transport, 6, prefetch)
    rng = random.Random(prefetch)
    for _ in range(10):
        for _ in range(30):
            (after,) = unshard(unsharded, units, rng.choice("0123456"))
            assert len(after[1:].replace("s", "")) <= 1 + prefetch
        unsharded.invalidate()
        assert states(units) == "sssssss" and not transport.parameters.buffers._in_use
    unsharded.close()


@on_ranks(1, transport=Adversary)
def test_a_wrong_guess_is_dropped(transport: Adversary) -> None:
    units, unsharded = simple(transport, 4, 1)
    unshard(unsharded, units, "123")
    unsharded.reshard_all()
    assert unshard(unsharded, units, "1") == ["sufss"]
    assert unshard(unsharded, units, "4") == ["ssfsu"], "in flight, it stays where it is not in the way"
    unsharded.reshard_all()
    unshard(unsharded, units, "1424")
    unsharded.reshard_all()
    assert unshard(unsharded, units, "14") == ["sussf", "ssfsu"]
    unsharded.close()


@on_ranks(1, transport=Adversary)
def test_a_unit_in_use_is_not_given_up_for_the_next(transport: Adversary) -> None:
    units, unsharded = simple(transport, 5, 1)
    unshard(unsharded, units, "12345")
    unsharded.reshard_all()
    units[1].num_running_forwards = 1
    assert unshard(unsharded, units, "1234") == ["sufsss", "suufss", "susufs", "sussuf"]
    unsharded.close()


@on_ranks(1, transport=Adversary)
def test_nothing_comes_after_the_end_of_a_minibatch(transport: Adversary) -> None:
    units, unsharded = simple(transport, 4, 2)
    unshard(unsharded, units, "01234")
    unsharded.reshard_all()
    unshard(unsharded, units, "01")
    assert UnitState.FETCHING in {unit.state for unit in units}
    unsharded.fetch_allowed = False
    unsharded.invalidate()
    buffers = transport.parameters.buffers
    assert states(units) == "sssss" and not buffers.on_the_way and not buffers._in_use
    with pytest.raises(RuntimeError, match="between the end of a minibatch and publish"):
        unsharded.unshard(units[1])
    assert states(units) == "sssss"
    unsharded.close()


@pytest.mark.parametrize(("transfers", "threads", "prefetch"), [(True, True, 0), (False, True, 2), (True, False, 2)])
@on_ranks(1)
def test_no_thread_where_none_is_of_use_or_allowed(
    transport: RecordingTransport, transfers: bool, threads: bool, prefetch: int
) -> None:
    transport.parameters.transfers, transport.thread_safe = transfers, threads
    model = ShardedModel(Stack(3).double(), transport, units=[Layer], prefetch=prefetch)
    for _ in range(2):
        with model.minibatch():
            squares(model, (INPUT,)).backward()
        model.publish()
    assert model._unsharded._thread is None
    assert (model._pusher._thread is not None) is (threads and prefetch > 0)
    model.close()


# Whole models


def step(model: ShardedModel, num_microbatches: int = 2) -> None:
    with model.minibatch():
        for _ in range(num_microbatches):
            squares(model, (INPUT,)).backward()
    model.publish()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_nothing_is_fetched_in_vain(checkpointing: bool) -> None:
    """In a model whose units are used in one order, prefetching fetches what is fetched without it."""

    def work(prefetch: int, transport: Adversary) -> list[str]:
        options = {"prefetch": prefetch, "activation_checkpointing": checkpointing}
        model = ShardedModel(Stack(6).double(), transport, units=[Layer], **options)
        step(model)
        transport.log.clear()
        for num_microbatches in (1, 0, 3):
            step(model, num_microbatches)
        model.close()
        return transport.names("fetch")

    plain, one_ahead, two_ahead = (run_ranks(1, partial(work, n), transport=Adversary)[0] for n in (0, 1, 2))
    assert one_ahead == plain
    assert len(two_ahead) < len(plain), "there is room for one more unit to stay"


@on_ranks(1, transport=Adversary)
def test_fetches_and_pushes_end_without_a_wait_for_them(transport: Adversary) -> None:
    """They overlap with the computation: the computing thread does nothing for them meanwhile."""
    model = ShardedModel(Stack(3).double(), transport, units=[Layer], prefetch=1)
    step(model)

    def wait_until(is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20.0
        while not is_done():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    with model.minibatch():
        model.module.first(INPUT)
        model.module.layers[0](INPUT)
        wait_until(lambda: not transport.parameters.buffers.on_the_way)
        assert model.units[2].state is UnitState.FETCHING
        transport.log.clear()
        squares(model, (INPUT,)).backward()
        wait_until(lambda: len(transport.names("push")) == 4)
    model.close()


# What goes wrong


def failing(transport: Adversary) -> ShardedModel:
    model = ShardedModel(Stack(5).double(), transport, units=[Layer], prefetch=1)
    step(model)
    return model


@pytest.mark.parametrize("operation", ["fetch", "push"])
@pytest.mark.parametrize("which", [0, 2, 4])
@on_ranks(1, transport=Adversary)
def test_an_error_in_a_thread_ends_the_minibatch(transport: Adversary, operation: str, which: int) -> None:
    model = failing(transport)
    transport.fails = operation, f"layers.{which}"
    with pytest.raises(ConnectionError, match=f"the {operation} went wrong"):
        step(model)
    model.close()


@on_ranks(1, transport=Adversary)
def test_a_wrong_guess_that_fails_raises_at_the_end_of_the_minibatch(transport: Adversary) -> None:
    model = failing(transport)
    transport.fails = "fetch", "layers.1"
    with pytest.raises(ConnectionError, match="the fetch went wrong"), model.minibatch():
        model.module.first(INPUT)
        model.module.layers[0](INPUT)
        assert model.units[2].state is UnitState.FETCHING
    model.close()


@on_ranks(1, transport=Adversary)
def test_a_model_can_be_closed_while_a_fetch_is_on_its_way(transport: Adversary) -> None:
    model = ShardedModel(Stack(5).double(), transport, units=[Layer], prefetch=1)
    step(model)
    transport.delay_s, transport.share_delayed = 0.1, 1.0
    with pytest.raises(ZeroDivisionError), model.minibatch():
        model.module.first(INPUT)
        model.module.layers[0](INPUT)
        raise ZeroDivisionError
    assert transport.parameters.buffers.on_the_way
    model.close()
    model.close()
    assert not transport.parameters.buffers._in_use
    threads = {*model._unsharded._thread._executor._threads, *model._pusher._thread._executor._threads}
    assert {thread.name for thread in threads} == {"odc_mpi-fetch_0", "odc_mpi-push_0"}
    assert not any(thread.is_alive() for thread in threads)
