"""The mailbox over a network that does all that MPI allows: late, in any order, and byte by byte."""

import threading
import time
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from adversary import Delays, Later
from ranks import run_threads

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce import mailbox, rings
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.settings import CommConfig
from odc_mpi.errors import UserError
from odc_mpi.runtime.job import Progress

SIZES = [1, 40, 333, 2000]
SMALLEST = 256  # bytes of a ring


def split(memory, parts):
    """Yield target, start and memory of messages of bytes."""
    for target, start, (size, first) in parts:
        yield target, start, memory.reshape(-1).view(np.uint8)[first : first + size]


class LateWindow:
    """Delivers in any order, some of it only when it is flushed; until then memory is to stay as it is."""

    def __init__(self, world, numel, dtype):
        self.tensor = torch.zeros(numel, dtype=dtype)
        self._delays = Delays(world.rank, numel, share_at_once=0.5)
        self._busy = threading.Lock()
        # One after the other on every rank, so that the last of each rank is the same.
        world.group.barrier.wait()
        world.group.windows[world.rank] = self
        world.group.barrier.wait()
        self._everyone = list(world.group.windows)

    def put_messages(self, values, parts):
        assert self._busy.acquire(blocking=False), "two threads at a time"
        for target, start, part in split(values, parts):
            self._delays.start(Later(self._deliver, part, target, start))
        self._busy.release()

    def flush(self):
        assert self._busy.acquire(blocking=False), "two threads at a time"
        self._delays.complete()
        self._busy.release()

    def get_messages(self, buffer, parts):
        self._busy.acquire()
        for target, start, part in split(buffer, parts):
            part[:] = self._everyone[target].tensor.numpy()[start : start + part.size]
        self._busy.release()

    def sync(self):
        pass

    def free(self):
        assert not self._delays.waiting or self.tensor.numel() < 100, "gradients were put and never flushed"

    def _deliver(self, values, target, start):
        memory = self._everyone[target].tensor.numpy()
        # A concurrent reader sees some of the lower bytes new and the upper ones old.
        parts = values.reshape(-1, 1) if values.size == 8 else [values]
        for part in parts:
            memory[start : start + part.size] = part
            start += part.size
            time.sleep(0)


class HastyWindow(LateWindow):
    """Keeps the order, but its flush comes back a little before the last bytes arrive: MPICH over libfabric's tcp."""

    def put_messages(self, values, parts):
        with self._busy:
            for target, start, part in split(values, parts):
                self._delays.waiting.append(Later(self._deliver, part, target, start))
                self._delays.waiting[-1].let_go()

    def flush(self):
        with self._busy:
            waiting = self._delays.waiting
            num_late = self._delays.rng.integers(3) if waiting and waiting[-1].size == 8 else 0
            self._arrive(max(0, len(waiting) - num_late))
        threading.Timer(0.002, self._arrive_late).start()

    def _arrive_late(self):
        with self._busy:
            self._arrive(len(self._delays.waiting))

    def _arrive(self, count):
        for deliver in self._delays.waiting[:count]:
            deliver()
        del self._delays.waiting[:count]


class LateStores(np.ndarray):
    """Others run between a load and the store that depends on it."""

    def __setitem__(self, key, value):
        time.sleep(1e-4)
        super().__setitem__(key, value)


class NodeWords:
    """Words that the threads of a node share, in place of `SharedWindow`."""

    def __init__(self, node, numel, dtype):
        with node.group.lock:
            new = np.zeros(numel, dtype=np.int64).view(LateStores), threading.Lock()
            self._words, self._lock = node.group.words.setdefault(node.number, new)

    def node_view(self, start, dtype, numel):
        return SimpleNamespace(numpy=lambda: self._words)

    def compare_and_swap(self, target, offset, expected, value):
        with self._lock:
            before = int(self._words[offset])
            if before == expected:
                self._words[offset] = value
            return before

    def atomic_store(self, target, offset, value):
        with self._lock:
            self._words[offset] = value

    def sync(self):
        time.sleep(0)

    def free(self):
        pass


class Poked(Progress):
    """Does what every call of MPI does, in place of one."""

    def __init__(self, group):
        super().__init__()
        self._group = group

    def poke(self):
        self._group.progress()
        return self.run_tasks()


class Group:
    def __init__(self, size, node_size=None):
        self.size, self.node_size = size, node_size or size
        self.words, self.lock = {}, threading.Lock()
        self.barrier = threading.Barrier(size, timeout=60)
        self.windows = [None] * size
        self._arrived = 0

    def synchronize(self, make_progress):
        """A barrier at which ranks serve while they wait."""
        with self.lock:
            self._arrived += 1
            target = -(-self._arrived // self.size) * self.size
        while self._arrived < target:
            self.progress()
            make_progress()

    def progress(self):
        """Yield to other threads, as every MPI call may."""
        if self.barrier.broken:  # another rank failed
            raise threading.BrokenBarrierError
        time.sleep(0)

    def world(self, rank):
        node_of = [each // self.node_size for each in range(self.size)]
        node, local_rank = divmod(rank, self.node_size)
        return SimpleNamespace(
            rank=rank,
            size=self.size,
            node=node,
            local_rank=local_rank,
            num_nodes=node_of[-1] + 1,
            layout=[("host", node_of.count(each)) for each in range(node_of[-1] + 1)],
            node_ranks=[each for each in range(self.size) if node_of[each] == node],
            gather_objects=lambda _: node_of,
            split=lambda _: SimpleNamespace(number=node, group=self, close=lambda: None),
            group=self,
            progress=Poked(self),
            deadline=lambda *_: nullcontext(),
        )


def run_ranks(size, work, node_size=None):
    """Run `work(world)` for each rank in a thread."""
    group = Group(size, node_size)
    run_threads(size, lambda rank: work(group.world(rank)), group.barrier)


@pytest.fixture(autouse=True)
def late_windows(monkeypatch):
    monkeypatch.setattr(mailbox, "Window", LateWindow)
    monkeypatch.setattr(rings, "SharedWindow", NodeWords)


def layouts(size, sizes=SIZES):
    return [FlatLayout.build(f"unit{i}", [ParameterSpec("p", (n,), True)], size) for i, n in enumerate(sizes)]


def drawn(rank, minibatch, dtype):
    """Yield the pushes of a rank in a minibatch: `(array, start, values)`."""
    rng = np.random.default_rng([rank, minibatch])
    for _ in range(rng.integers(0, 6)):
        index = int(rng.integers(len(SIZES)))
        start, stop = sorted(rng.integers(0, SIZES[index] + 1, size=2).tolist())
        yield index, start, torch.from_numpy(rng.integers(-1000, 1000, size=stop - start)).to(dtype)


def assert_sums(reduction, minibatch):
    wanted = [torch.zeros(numel, dtype=torch.float64) for numel in SIZES]
    for rank in range(reduction.world.size):
        for index, start, values in drawn(rank, minibatch, torch.float64):
            wanted[index][start : start + len(values)] += values
    for index, layout in enumerate(reduction.layouts):
        start, stop = layout.owned(reduction.world.rank)
        shard = reduction.shard(index)
        assert torch.equal(shard[: stop - start].double(), wanted[index][start:stop])
        assert not shard[stop - start :].any(), "padding was written to"
        shard.zero_()


def allocated(world, sizes=SIZES, dtype=torch.float32, **settings):
    reduction = MailboxGradientStore(world, dtype, CommConfig(**settings))
    reduction.plan(layouts(world.size, sizes))
    reduction.allocate()
    return reduction


def train(world, ring_bytes, dtype, num_minibatches=6, serving_thread=False):
    reduction = allocated(world, SIZES, dtype, mailbox_bytes=ring_bytes * max(1, rings.Rings(world, 4).count))
    stop = threading.Event()

    def make_progress():
        while not stop.wait(1e-4):
            reduction.make_progress()

    server = threading.Thread(target=make_progress)
    if serving_thread:
        server.start()
    try:
        for minibatch in range(num_minibatches):
            pushes = [reduction.push(i, values, start) for i, start, values in drawn(world.rank, minibatch, dtype)]
            for push in reversed(pushes):
                push.wait()
            reduction.flush()
            world.group.synchronize(reduction.make_progress)
            reduction.complete()
            assert_sums(reduction, minibatch)
            world.group.barrier.wait()
    finally:
        stop.set()
        if serving_thread:
            server.join()
    reduction.free()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("ring_bytes", [SMALLEST, 5 * SMALLEST + 64, 1 << 20])
@pytest.mark.parametrize(("dtype", "serving_thread"), [(torch.float32, True), (torch.float64, False)])
def test_sums_are_exact(size, ring_bytes, dtype, serving_thread):
    num_minibatches = 3 if ring_bytes == SMALLEST else 6  # of which each fills the ring many times
    options = {"num_minibatches": num_minibatches, "serving_thread": serving_thread}
    run_ranks(size, partial(train, ring_bytes=ring_bytes, dtype=dtype, **options))


@pytest.mark.parametrize(("size", "node_size"), [(3, 2), (4, 2), (5, 3)])
@pytest.mark.parametrize("ring_bytes", [SMALLEST, 1 << 20])
def test_sums_are_exact_where_ranks_of_a_node_share_rings(size, node_size, ring_bytes):
    options = {"num_minibatches": 3, "serving_thread": size == 4}
    work = partial(train, ring_bytes=ring_bytes, dtype=torch.float32, **options)
    run_ranks(size, work, node_size)


@pytest.mark.parametrize("ring_bytes", [SMALLEST, 1 << 20])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_exact_where_a_flush_comes_back_early(size, ring_bytes, monkeypatch):
    monkeypatch.setattr(mailbox, "Window", HastyWindow)
    run_ranks(size, partial(train, ring_bytes=ring_bytes, dtype=torch.float32))


def test_small_pushes_that_fill_no_ring_do_not_run_out_of_headers():
    """An owner does not report each slot that it has added."""

    def work(world):
        reduction = allocated(world, [64, 100_000])
        if world.rank == 0:
            for _ in range(300):
                reduction.push(0, torch.ones(32), 32).wait()
            reduction.flush()
        world.group.synchronize(reduction.make_progress)
        reduction.complete()
        assert world.rank == 0 or (reduction.shard(0) == 300).all()

    run_ranks(2, work)


def test_a_push_flushes_all_rings_at_once():
    def work(world):
        reduction = allocated(world)
        flushes, flush = [], reduction._inbox.flush
        reduction._inbox.flush = lambda: (flushes.append(world.rank), flush())
        reduction.push(2, torch.ones(333)).wait()  # a slot for each of the other three
        assert len(flushes) == 1
        reduction.flush()
        world.group.barrier.wait()

    run_ranks(4, work)


def test_what_has_arrived_is_added_in_the_order_of_ranks_and_of_their_pushes():
    """Numbers whose sum depends on the order: the first two of each rank cancel, and absorb those between."""

    def work(world):
        reduction = allocated(world, [1])
        if world.rank:
            for value in (1e8, world.rank, -1e8, 0.1 * world.rank):
                reduction.push(0, torch.tensor([value], dtype=torch.float32), 0).wait()
            reduction.flush()
        world.group.barrier.wait()
        reduction.complete()
        if world.rank == 0:
            wanted = torch.zeros((), dtype=torch.float32)
            for rank in range(1, world.size):
                for value in (1e8, rank, -1e8, 0.1 * rank):
                    wanted += torch.tensor(value, dtype=torch.float32)
            assert reduction.shard(0)[0] == wanted

    run_ranks(4, work)


def test_a_rank_that_is_late_with_a_reserved_slot_is_waited_for_when_the_ring_is_full_and_is_named():
    """Slots of another rank of its node are added meanwhile."""
    late, full, named = threading.Event(), threading.Event(), []

    def deadline(what, ranks=()):
        if what.startswith("waiting for room"):
            named.append(ranks)
            full.set()
        return nullcontext()

    def work(world):
        reduction = allocated(world, [3 * 64], mailbox_bytes=8 * SMALLEST)
        put = reduction._put
        if world.rank == 0:
            assert late.wait(60)
            world.deadline = deadline
        elif world.rank == 1:
            reduction._put = lambda slots: (late.set(), full.wait(60), put(slots))
        if world.rank < 2:
            for value in range(4):
                reduction.push(0, torch.full((64,), 10.0**value), reduction.layouts[0].owned(2)[0]).wait()
            reduction.flush()
        world.group.synchronize(reduction.make_progress)
        reduction.complete()
        assert world.rank < 2 or (reduction.shard(0) == 2222.0).all()

    run_ranks(3, work, node_size=2)
    assert named == [[2, 1]]


def test_a_holder_of_the_lock_is_named():
    named = []

    def work(world):
        shared = rings.Rings(world, 4)
        shared.plan(10_000, [100])
        shared.allocate()
        world.deadline = lambda what, ranks: (named.append((what, ranks)), released.set(), nullcontext())[2]
        if world.rank == 1:
            with shared.lock():
                held.set()
                assert released.wait(60)
        elif world.rank == 0:
            assert held.wait(60)
            with shared.lock():
                pass

    held, released = threading.Event(), threading.Event()
    run_ranks(3, work, node_size=2)
    assert named == [("reserving room in mailboxes, which another rank of the node does", [1])]


def test_counters_and_slots_that_contradict_each_other_are_errors():
    """Also under `python -O`."""

    def work(world):
        reduction = allocated(world, mailbox_bytes=SMALLEST)
        if world.rank == 0:
            reduction._heads[1] = -1
            with pytest.raises(RuntimeError, match="a rank synchronized before its gradients had arrived"):
                reduction.complete()
            reduction._heads[1] = 128  # no slot was written
            with pytest.raises(RuntimeError, match=r"slot 0 of rank 1: expected elements at .* 0 to 256, got 0 at 0"):
                reduction.complete()

    run_ranks(2, work)


def test_a_mailbox_without_space_for_one_element_of_each_peer_is_refused():
    world = Group(4).world(0)
    MailboxGradientStore(world, torch.float64, CommConfig(mailbox_bytes=3 * SMALLEST)).plan(layouts(4))
    little = CommConfig(mailbox_bytes=3 * SMALLEST - 1)
    with pytest.raises(UserError, match=r"comm.mailbox_bytes must be at least 768 .* got 767$"):
        MailboxGradientStore(world, torch.float64, little).plan(layouts(4))
    MailboxGradientStore(Group(1).world(0), torch.float64, CommConfig(mailbox_bytes=1)).plan(layouts(1))


def test_memory_is_bounded_by_the_setting_and_by_the_need():
    many, few = Group(9).world(0), Group(2).world(0)
    counters = 2 * 128  # nine of eight bytes each, in lines of 64
    for mailbox_bytes in (10_000, 1 << 20, 50_000_000):
        store = MailboxGradientStore(many, torch.float32, CommConfig(mailbox_bytes=mailbox_bytes))
        planned = store.plan(layouts(9, [10**9]))
        headers = 9 * min(128, mailbox_bytes // 8 // 256 * 4) * 32
        assert 0.75 * mailbox_bytes < planned - counters - headers <= mailbox_bytes
    assert MailboxGradientStore(few, torch.float32, CommConfig()).plan(layouts(2, [1000])) < 9000


def test_the_size_of_a_ring_depends_on_the_number_of_nodes():
    for node_size in (8, 32):
        shared = rings.Rings(Group(1024, node_size).world(0), 4)
        shared.plan(64 << 20, [10**9])
        assert shared.ring_bytes * (1024 // node_size) == 64 << 20
