"""Cache of parameters in memory that the ranks of a node share. A node fetches each array once per publication.

Frozen arrays do not change after their first publication, so a node fetches them once after it.

Each array has a word in shared memory: the version of the parameters, the rank that fetches, and whether it has.

    claim    the first rank that needs an array sets its word by compare-and-swap, and fetches the array
    ready    after the transfer it sets the word again; the other ranks wait for this, and read the array in place
    sync     each publication raises the version on every rank; a word of an earlier version counts as not claimed. The
             version of a frozen array is that of the first publication at most

Ranks need no other coordination, since parameters do not change between two publications.

Note: no stale read
    A rank overwrites an array only after claiming it for the current version, and so after a barrier that each rank
    enters only when it has released its earlier fetches. It reads an array only if the word is ready for this version.

Note: no deadlock
    A rank that holds a claim is fetching a unit: it claims arrays of the unit, starts their transfers, and completes
    all its arrays one after another, in an order that is the same on all ranks. Of the arrays for which ranks wait in
    this unit, take the first. The rank that claimed it waits for its transfer, and not for another rank of the node.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout
from odc_mpi.comm.shard_storage import ShardStorage
from odc_mpi.comm.transport import Access, ParameterStore
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import align_up
from odc_mpi.comm.windows.shared_window import SharedWindow
from odc_mpi.comm.work import Work
from odc_mpi.runtime.deadline import wait_until

#: Version after the first publication: `Transport.allocate` and each publication call `sync` twice.
_FIRST_PUBLICATION = 4


class NodeCache(ShardStorage, ParameterStore):
    """Parameter store that fetches with `inner` into memory that the node shares, and returns views of this memory.

    `inner` is a storage of the transport, too: the transport allocates and frees it.
    """

    access = Access.NODE

    def __init__(self, inner: WindowParameters) -> None:
        super().__init__(inner.dtype)
        self._inner, self._world = inner, inner.world
        self._arrays: list[torch.Tensor] = []
        self._rank_bytes = self._version = 0
        self._shared_fetches: list[int] = []

    @override
    def plan(self, layouts: Sequence[FlatLayout]) -> int:
        super().plan(layouts)
        sizes = (x.num_owners * x.shard_numel * self.dtype_of(index).itemsize for index, x in enumerate(layouts))
        *self._starts, num_bytes = accumulate(sizes, initial=0)
        self._rank_bytes = align_up(-(-num_bytes // self._world.local_size))
        return self._rank_bytes + torch.int64.itemsize * len(layouts)

    @override
    def allocate(self) -> None:
        self._node = self._world.split("node")
        self._memory = SharedWindow(self._node, self._rank_bytes, torch.uint8)
        self._words = SharedWindow(self._node, len(self.layouts), torch.int64)
        # The words of rank 0 of the node are used.
        self._state = self._words.node_view(0, torch.int64, len(self.layouts)).numpy()
        self._arrays = [
            self._memory.node_view(start, self.dtype_of(index), layout.numel)
            for index, (start, layout) in enumerate(zip(self._starts, self.layouts, strict=True))
        ]

    @override
    def sync(self) -> None:
        # No rank fetches between the two calls of a publication, so ranks need not make these calls at the same time.
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
    @property
    def node_cache_bytes(self) -> int:
        return self._rank_bytes

    @override
    def acquire_buffer(self, index: int) -> torch.Tensor:
        return self._arrays[index][:]

    @override
    def release(self, fetched: torch.Tensor) -> None:
        pass  # the memory stays

    @override
    def start_fetch(self, index: int, buffer: torch.Tensor) -> Work:
        self._world.progress.run_tasks()
        word, claim = int(self._state[index]), self._word(index, self._world.local_rank)
        if word < self._word(index, 0) and self._words.compare_and_swap(0, index, word, claim) == word:
            return Work(partial(self._finish, index, claim, self._inner.start_fetch(index, buffer)))
        self._shared_fetches.append(index)
        return Work(partial(self._wait, index))

    @override
    def take_shared_fetches(self) -> list[int]:
        taken, self._shared_fetches = self._shared_fetches, []
        return taken

    def _word(self, index: int, local_rank: int) -> int:
        """Return the word of an array that a rank of the node has claimed. The word of a ready array is larger by 1."""
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
            # Ranks of other nodes may need this rank in MPI, and the transfer that it waits for may need them.
            wait_until(lambda: self._is_ready(index), self._world.progress.poke)
        self._words.sync()
        self._memory.sync()
