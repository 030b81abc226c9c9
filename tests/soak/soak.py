"""Many minibatches of random pushes and fetches, every gradient and parameter checked against the exact value.

    mpiexec -n RANKS python tests/soak/soak.py --minibatches 500

Arrays, sizes, dtypes, the reduction, the size of the mailbox, the progress thread, and the assignment of each
microbatch (by turns, all by one rank, or any by its ticket): all are drawn again every few minibatches. Ranks
sleep at random, push different numbers of gradients, also none, and have several on their way. Values are integers, so
that sums are exact in any order; every rank knows from the seed what all microbatches push.

On two hosts, by network namespaces:

    python tests/hosts/two_hosts.py --ranks-per-host 2,1 -- tests/soak/soak.py --minibatches 500

A run by hand also prints what is left in /dev/shm, and then exits with code 1.
"""

import argparse
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from odc_mpi.comm.factory import window_transport
from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.settings import CommConfig
from odc_mpi.comm.tickets import Tickets
from odc_mpi.runtime.world import World

MINIBATCHES_PER_LIFE = 20
MAX_NUMEL = 200_000
#: Limit of one microbatch.
MAX_PUSHES = 4
#: Limit of a minibatch, for each rank.
MAX_MICROBATCHES = 3
DISTRIBUTIONS = ("by turns", "all by one rank", "tickets")
SMALLEST_RING = 256


class Life:
    """A transport with random arrays, and its minibatches. `num_checked` sums were compared."""

    def __init__(self, world, seed, reduction, tickets):
        # The same draw on every rank.
        self.world, self.seed, self.tickets = world, seed, tickets
        rng = np.random.default_rng(seed)
        self.sizes = np.exp(rng.uniform(0, np.log(MAX_NUMEL), size=rng.integers(1, 6))).astype(int).tolist()
        self.dtype = [torch.float32, torch.float64, torch.int64][rng.integers(3)]
        self.num_checked = 0
        self.distribution = DISTRIBUTIONS[rng.integers(len(DISTRIBUTIONS))]
        # From a 64th of all gradients to more than is of use.
        mailbox_bytes = max(SMALLEST_RING * world.size, int(sum(self.sizes) * 8 * 4 ** rng.uniform(-3, 1)))
        zero_copy = ("off", "auto")[rng.integers(2)]
        comm = CommConfig(zero_copy=zero_copy, reduction=reduction, mailbox_bytes=mailbox_bytes)
        self.transport = window_transport(world, torch.float32, self.dtype, comm)
        self.has_thread = bool(rng.integers(2))
        specs = enumerate([ParameterSpec("p", (numel,), True)] for numel in self.sizes)
        self.transport.allocate([FlatLayout.build(f"unit{i}", spec, world.size) for i, spec in specs])
        self.name = (
            f"{reduction}, {mailbox_bytes if reduction == 'mailbox' else 0} bytes, {self.sizes}, "
            f"thread {self.has_thread}, microbatches: {self.distribution}"
        )

    @contextmanager
    def serving(self):
        """Have a thread serve, if this life has one."""
        stop = threading.Event()

        def make_progress():
            while not stop.wait(1e-3):
                self.world.progress.run_tasks()

        thread = threading.Thread(target=make_progress)
        if self.has_thread:
            thread.start()
        yield
        stop.set()
        if self.has_thread:
            thread.join()

    def num_microbatches(self, minibatch):
        return int(np.random.default_rng([*self.seed, minibatch]).integers(MAX_MICROBATCHES * self.world.size + 1))

    def microbatches_of_rank(self, minibatch):
        count, size = self.num_microbatches(minibatch), self.world.size
        if self.distribution == "tickets":
            return self.tickets.draw(count)
        if self.distribution == "by turns":
            return range(self.world.rank, count, size)
        return range(count if minibatch % size == self.world.rank else 0)

    def pushes(self, minibatch, microbatch):
        """Yield the pushes of a microbatch: `(array, start, values)`."""
        rng = np.random.default_rng([*self.seed, minibatch, microbatch])
        for _ in range(rng.integers(0, MAX_PUSHES + 1)):
            index = int(rng.integers(len(self.sizes)))
            start, stop = sorted(rng.integers(0, self.sizes[index] + 1, size=2).tolist())
            yield index, start, rng.integers(-1000, 1000, size=stop - start)

    def parameters(self, index, minibatch):
        return torch.arange(minibatch, minibatch + self.sizes[index], dtype=torch.float32)

    def minibatch(self, minibatch):
        """Push, fetch, pass A, check, pass B."""
        local_rng = (
            np.random.default_rng()
        )  # no other rank needs to know when this rank sleeps and which arrays it fetches
        on_the_way = []
        for index, start, values in (
            push for microbatch in self.microbatches_of_rank(minibatch) for push in self.pushes(minibatch, microbatch)
        ):
            gradient = torch.from_numpy(values).to(self.dtype)
            on_the_way.append((self.transport.gradients.push(index, gradient, start), gradient))
            time.sleep(local_rng.choice([0, 1e-4, 2e-3, 5e-2], p=[0.4, 0.3, 0.28, 0.02]))
            if len(on_the_way) > local_rng.integers(4):
                pending, gradient = on_the_way.pop(local_rng.integers(len(on_the_way)))
                pending.wait()
            index = int(local_rng.integers(len(self.sizes)))
            fetched = self.transport.parameters.fetch(index).wait()
            assert torch.equal(fetched, self.parameters(index, minibatch)), f"parameters of {self.name}"
            self.transport.parameters.release(fetched)
        for pending, _ in on_the_way:
            pending.wait()
        self.transport.complete_gradients(np.zeros(1))
        self.tickets.reset()
        self.check(minibatch)
        self.publish(minibatch + 1)

    def check(self, minibatch):
        """Compare this rank's shards with the exact sums, then clear them."""
        wanted = [np.zeros(numel) for numel in self.sizes]
        for microbatch in range(self.num_microbatches(minibatch)):
            for index, start, values in self.pushes(minibatch, microbatch):
                wanted[index][start : start + values.size] += values
        for index, layout in enumerate(self.transport.parameters.layouts):
            start, stop = layout.owned(self.world.rank)
            shard = self.transport.gradients.shard(index)
            assert np.array_equal(shard[: stop - start].numpy(), wanted[index][start:stop]), f"sums of {self.name}"
            assert not shard[stop - start :].any(), f"padding of {self.name}"
            shard.zero_()
            self.num_checked += stop - start

    def publish(self, minibatch):
        for index, layout in enumerate(self.transport.parameters.layouts):
            start, stop = layout.owned(self.world.rank)
            self.transport.parameters.shard(index)[: stop - start] = self.parameters(index, minibatch)[start:stop]
        self.transport.publish_parameters()


def soak(world, num_minibatches, seed, reductions):
    """Run lives for `num_minibatches` minibatches, alternating the reductions; return the number of checked values."""
    num_done = num_checked = 0
    tickets = Tickets(world)
    while num_done < num_minibatches:
        number = num_done // MINIBATCHES_PER_LIFE
        life = Life(world, [seed, number], reductions[number % len(reductions)], tickets)
        with life.serving():
            life.publish(0)
            for minibatch in range(min(MINIBATCHES_PER_LIFE, num_minibatches - num_done)):
                life.minibatch(minibatch)
                num_done += 1
        num_checked += life.num_checked
        life.transport.close()
    tickets.close()
    return num_checked


def main():
    parser = argparse.ArgumentParser(description="Check many minibatches of random pushes against exact sums.")
    parser.add_argument("--minibatches", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduction", choices=["accumulate", "mailbox"], help="both by turns without it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reductions = (arguments.reduction,) if arguments.reduction else ("accumulate", "mailbox")
    with World(timeout_s=120) as world:
        began = time.perf_counter()
        shared = set(Path("/dev/shm").iterdir())  # with what MPI itself made there
        checked = soak(world, arguments.minibatches, arguments.seed, reductions)
        gathered = world.gather_objects((checked, set(Path("/dev/shm").iterdir()) - shared))
        if world.rank:
            return 0
        left = set().union(*(files for _, files in gathered))
        print(
            f"soak: {arguments.minibatches} minibatches on {world.size} ranks of {world.num_nodes} nodes, seed "
            f"{arguments.seed}, {' and '.join(reductions)}: {sum(checked for checked, _ in gathered):,} sums exact, "
            f"{time.perf_counter() - began:.0f} s, {world.mpi_library}"
        )
        print(f"  left in /dev/shm: {', '.join(sorted(map(str, left))) or 'nothing'}")
        return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
