"""Cache of parameters in memory shared by the ranks on a node. A node fetches each array once per publication.

Each array has a word in shared memory: the parameter version, the fetching rank, and whether its fetch is complete.

    claim    the first rank that needs an array sets its word by compare-and-swap and fetches the array
    ready    after the transfer, that rank sets the word again; other ranks wait until then and read the array directly
    publish  each publication increments the version on every rank; a word with an earlier version counts as unclaimed.
             For frozen arrays, the version stays that of the first publication

Note: no stale read
    A rank overwrites an array only after claiming it for the current version, and thus after a barrier that ranks enter
    only once they have released their earlier fetches. A rank reads an array only if its word is ready in this version.

Note: no deadlock
    A rank claims the arrays of a unit, starts their transfers, and completes them in an order that is the same on all
    ranks. Consider the first array in this order for which a rank waits. The rank that has claimed it waits only for
    its own transfer, not for another rank on the node.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.transport import ParameterStore, ShardStorage
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import SharedWindow, align_up
from odc_mpi.comm.work import Work
from odc_mpi.runtime.deadline import wait_until

#: Version after the first publication. In version 1, the shards contain zeros.
_FIRST_PUBLICATION = 2


class NodeCache(ShardStorage, ParameterStore):
    """Parameter store that uses the store `inner` to fetch arrays into memory shared by the ranks on a node.

    A fetch returns a view of this memory. `inner` must be one of the transport's storages.
    """

    stays_valid = True
    #: Size in bytes of this rank's share of the cache. Set by `plan`.
    rank_bytes = 0

    def __init__(self, inner: WindowParameters) -> None:
        super().__init__(inner.dtype)
        self._inner, self._world = inner, inner.world
        self._arrays: list[torch.Tensor] = []
        self._version = 1

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        sizes = (x.num_owners * x.shard_numel * self.dtype_of(index).itemsize for index, x in enumerate(layouts))
        *self._starts, num_bytes = accumulate(sizes, initial=0)
        self.rank_bytes = align_up(-(-num_bytes // self._world.local_size))
        return self.rank_bytes + torch.int64.itemsize * len(layouts)

    @override
    def allocate(self) -> None:
        self._node = self._world.split("node")
        self._memory = SharedWindow(self._node, self.rank_bytes, torch.uint8)
        self._words = SharedWindow(self._node, len(self.layouts), torch.int64)
        # Only the words of rank 0 on the node are used.
        self._state = self._words.node_view(0, torch.int64, len(self.layouts)).numpy()
        self._arrays = [
            self._memory.node_view(start, self.dtype_of(index), layout.numel)
            for index, (start, layout) in enumerate(zip(self._starts, self.layouts, strict=True))
        ]

    @override
    def publish(self) -> None:
        # Before the barrier of a publication, and no rank fetches until after it.
        self._version += 1

    @override
    def mapped_memory(self) -> list[torch.Tensor]:
        return [self._memory.mapped_memory]

    @override
    def free(self) -> None:
        self._arrays = []
        del self._state
        self._words.free()
        self._memory.free()
        self._node.close()

    @override
    def shard(self, index: int) -> torch.Tensor:
        return self._inner.shard(index)

    @override
    def acquire_buffer(self, index: int) -> torch.Tensor:
        return self._arrays[index][:]

    @override
    def release(self, fetched: torch.Tensor) -> None:
        pass  # the memory remains allocated

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self._world.progress.run_tasks()
        word, claim = int(self._state[index]), self._word(index, self._world.local_rank)
        if word < self._word(index, 0) and self._words.compare_and_swap(0, index, word, claim) == word:
            return Work(partial(self._finish, index, claim, self._inner.start_fetch(index, buffer)))
        return Work(partial(self._wait, index))

    def _word(self, index: int, local_rank: int) -> int:
        """Return the word of an array claimed by a rank on the node. The word of a ready array is larger by 1."""
        version = self._version if self.layouts[index].trainable else min(self._version, _FIRST_PUBLICATION)
        return 2 * (version * self._world.local_size + local_rank)

    def _is_ready(self, index: int) -> bool:
        word = int(self._state[index])
        return word >= self._word(index, 0) and word % 2 == 1

    def _finish(self, index: int, claim: int, fetch: Work) -> None:
        fetch.wait()
        self._memory.sync()
        self._words.atomic_store(0, index, claim + 1)

    def _wait(self, index: int) -> None:
        fetching = (int(self._state[index]) // 2) % self._world.local_size
        what = f"fetching unit {self.layouts[index].name}, which another rank fetches for this node"
        with self._world.deadline(what, [self._world.node_ranks[fetching]]):
            # Ranks on other nodes may need this rank to enter MPI, and the transfer that it waits for may need them.
            wait_until(lambda: self._is_ready(index), self._world.progress.poke)
        self._words.sync()
        self._memory.sync()
