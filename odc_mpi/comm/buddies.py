"""Copies of files on other nodes: each rank sends its files to its *buddy*, a rank of the next node.

    exchange   send the parts of a file to the buddy, and receive those of other ranks: one part at a time, so that a
               fetch of the next minibatch waits for at most one part of a file

A background thread calls this, on a communicator of its own, which needs MPI_THREAD_MULTIPLE. No rank waits for it.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from mpi4py import MPI

from odc_mpi.runtime.deadline import wait_until
from odc_mpi.runtime.world import World

#: Size of a part in bytes. At 1 GB/s, it takes 4 ms.
PART_BYTES = 1 << 22


class Buddies:
    """The rank with the same local rank on the next node, and the ranks of which this is the buddy. Collective.

    There must be several nodes. If the next node has fewer ranks, some of them are buddies of several ranks.

    Attributes:
        sources: Ranks whose files arrive here.
    """

    def __init__(self, world: World) -> None:
        places = world.gather_objects((world.node, world.local_rank))
        num_ranks = Counter(node for node, _ in places)
        targets = []
        for node, local_rank in places:
            following = (node + 1) % world.num_nodes
            targets.append(places.index((following, local_rank % num_ranks[following])))
        self.sources = [rank for rank, target in enumerate(targets) if target == world.rank]
        self._world, self._target = world, targets[world.rank]
        assert world.job.status is not None
        self._prepare = world.job.status.prepare
        with world.collective("duplicating the communicator for copies of checkpoints"):
            self._comm = world.comm.Dup()
        world.on_close(self._comm.Free)

    def exchange(self, files: Sequence[Path | None], copies: Mapping[int, Sequence[Path]]) -> None:
        """Send this rank's files to its buddy, and write those of `sources` to the paths `copies`.

        All ranks call this with equally many files, and wait for their buddies. None stands for a missing file: its
        copy and those after it are not written. After an `OSError` in writing, further copies of that source are not
        written either; the error is raised when all files have been sent.
        """
        self._prepare()
        errors: dict[int, OSError] = {}
        for number, file in enumerate(files):
            self._exchange_file(file, {source: copies[source][number] for source in self.sources}, errors)
        if errors:
            raise next(iter(errors.values()))

    def _exchange_file(self, file: Path | None, copies: Mapping[int, Path], errors: dict[int, OSError]) -> None:
        with ExitStack() as stack:
            own = stack.enter_context(file.open("rb", buffering=0)) if file else None
            size = os.fstat(own.fileno()).st_size if own else -1
            sizes = {source: np.empty(1, dtype=np.int64) for source in self.sources}
            self._transfer(np.array([size]), sizes)
            incoming: dict[int, BinaryIO] = {}
            for source, path in copies.items():
                if sizes[source][0] >= 0 and source not in errors:
                    try:
                        incoming[source] = stack.enter_context(_open_for_size(path, int(sizes[source][0])))
                    except OSError as error:
                        errors[source] = error
            for first in range(0, max(size, *(int(each[0]) for each in sizes.values()), 0), PART_BYTES):
                part = np.frombuffer(own.read(PART_BYTES), np.uint8) if own and first < size else None
                received = {
                    source: np.empty(min(PART_BYTES, int(each[0]) - first), dtype=np.uint8)
                    for source, each in sizes.items()
                    if first < each[0]
                }
                self._transfer(part, received)
                for source, content in received.items():
                    if source in incoming and source not in errors:
                        try:
                            _write(incoming[source], content)
                        except OSError as error:
                            errors[source] = error

    def _transfer(self, content: np.ndarray | None, received: Mapping[int, np.ndarray]) -> None:
        """Send an array to the buddy, and receive one from each of some sources."""
        requests = [self._comm.Irecv(buffer, source=source) for source, buffer in received.items()]
        if content is not None:
            requests.append(self._comm.Isend(content, dest=self._target))
        with self._world.deadline("copying the state to the next node", [self._target, *received]):
            wait_until(lambda: MPI.Request.Testall(requests))


def _open_for_size(path: Path, num_bytes: int) -> BinaryIO:
    """Open a file for writing from its beginning, in the memory that it already has. It ends after `num_bytes`."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0)
    file.truncate(num_bytes)
    return file


def _write(file: BinaryIO, content: np.ndarray) -> None:
    view, num_written = memoryview(content), 0  # type: ignore[arg-type]
    while num_written < len(view):  # less is written, without an error, where memory ends
        num_written += file.write(view[num_written:])
