"""Processes that tokenise: blocks go out, their tokens come back in order. No MPI.

Each worker is a Python of its own with a socket pair to this process; it is not forked, since a fork takes neither the
threads of the tokenizers library nor h5py's locks over in a sane state, nor are there any threads or locks for this
process to share. A worker has a session of its own, so that Ctrl-C in a terminal reaches only this process, which ends
its workers; and it ends by itself when its pipe closes.

Memory: each worker has at most two blocks, and the blocks that wait for an earlier one are bounded, too.
"""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from odc_mpi.data.blocks import EncodedBlock, Limits, encode_block
from odc_mpi.data.examples import Fields
from odc_mpi.data.sources import Block
from odc_mpi.data.tokenizer import load_files, load_tokenizer
from odc_mpi.errors import UserError

_IN_FLIGHT = 2  # blocks of a worker: one that it works on, and the next
_WAITING = 4  # blocks of each worker that may be done before an earlier block is


@dataclass(frozen=True)
class Job:
    """What a worker needs to know before its first block.

    Attributes:
        tokenizer: Where the tokenizer is, a directory or a data set, or the content of its files by name.
        limits: Which sequences are written.
    """

    tokenizer: Path | dict[str, bytes]
    limits: Limits


class Workers(AbstractContextManager["Workers"]):
    """Some processes that tokenise. A context manager: leaving it ends them at once."""

    def __init__(self, num_workers: int, job: Job) -> None:
        """Start the processes. Local; returns immediately.

        Raises:
            OSError: A process cannot be started.
        """
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        try:
            for _ in range(num_workers):
                self._start(job)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job) -> None:
        ours, theirs = Pipe()
        with theirs:
            # One thread for each worker: they are as many as there are cores.
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
            self._connections.append(ours)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=environment,
                )
            )
        with suppress(OSError):  # a worker that is gone already: heard of when its result is waited for
            ours.send(job)

    def encode(self, blocks: Iterable[tuple[int, Block, Fields]]) -> Iterator[tuple[int, EncodedBlock]]:
        """Tokenise blocks. Local.

        Args:
            blocks: The index of the source, the block, and the names of its fields.

        Yields:
            The index of the source and the tokens, in the order of the blocks.

        Raises:
            UserError: As of `encode_block`, at the first block for which it is raised; or a worker has ended.
        """
        waiting: dict[int, tuple[int, EncodedBlock | UserError]] = {}
        sources: dict[int, int] = {}
        load = [0] * len(self._connections)
        remaining = enumerate(blocks)
        due, more = 0, True
        while True:
            while more and len(sources) + len(waiting) < len(load) * (_IN_FLIGHT + _WAITING) and min(load) < _IN_FLIGHT:
                index, item = next(remaining, (0, None))
                if item is None:
                    more = False
                    break
                worker = load.index(min(load))
                sources[index] = item[0]
                load[worker] += 1
                self._send(worker, (index, *item[1:]))
            if not sources and due not in waiting:
                return
            for worker, index, result in self._receive(block=due not in waiting):
                load[worker] -= 1
                waiting[index] = sources.pop(index), result
            if due in waiting:
                source, result = waiting.pop(due)
                due += 1
                if isinstance(result, UserError):
                    raise result
                yield source, result

    def _send(self, worker: int, message: Any) -> None:
        try:
            self._connections[worker].send(message)
        except OSError as error:
            raise self._ended(worker) from error

    def _receive(self, block: bool) -> list[tuple[int, int, EncodedBlock | UserError]]:
        """Return the results that are there: the worker, the block's index, and the result."""
        results = []
        for ready in wait(self._connections, timeout=None if block else 0):
            worker = self._connections.index(ready)  # type: ignore[arg-type]
            try:
                results.append((worker, *self._connections[worker].recv()))
            except (EOFError, OSError) as error:
                raise self._ended(worker) from error
        return results

    def _ended(self, worker: int) -> UserError:
        process = self._processes[worker]
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        code = process.returncode
        how = "is gone" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return UserError(
            f"a process that tokenises (process {process.pid}) {how}: is there enough memory for --num-proc "
            f"{len(self._processes)}?"
        )

    def close(self) -> None:
        """End the processes at once. Local; a second call does nothing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for connection in self._connections:
            connection.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(connection: Connection) -> None:
    """Tokenise blocks until the connection closes."""
    job = connection.recv()
    blocks: queue.SimpleQueue = queue.SimpleQueue()
    # Reads ahead, so that sending a block waits neither for the tokenizer to load nor for the block before it.
    threading.Thread(target=_read_ahead, args=(connection, blocks), daemon=True).start()
    tokenizer = load_files(job.tokenizer) if isinstance(job.tokenizer, dict) else load_tokenizer(job.tokenizer)
    while (message := blocks.get()) is not None:
        index, block, fields = message
        try:
            result: EncodedBlock | UserError = encode_block(tokenizer, block, fields, job.limits)
        except UserError as error:
            result = error
        connection.send((index, result))


def _read_ahead(connection: Connection, blocks: queue.SimpleQueue) -> None:
    message: Any = ()
    while message is not None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            message = None
        blocks.put(message)


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _work(Connection(int(sys.argv[1])))
