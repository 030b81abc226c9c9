"""CPU time of a fetch and of a push of an array with very many owners, without their processes.

    python benchmarks/many_owners.py [--owners N]

The stores are those of training, in a world of one rank that claims to have N. All messages go to MPI.PROC_NULL, so
mpi4py does all of its work and nothing is transferred. Prints one JSON object: for a "fetch", and for a push with
"accumulate" and with "mailbox", the CPU time of the calling thread in milliseconds, the least of all repeats. It
includes the replacement of the targets, which takes about 0.05 ms for 1024 owners.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from time import thread_time
from unittest.mock import patch

import torch
from mpi4py import MPI
from typing_extensions import override

from odc_mpi.comm.layout import FlatLayout, ParameterSpec
from odc_mpi.comm.reduce import mailbox
from odc_mpi.comm.reduce.accumulate import AccumulateGradientStore
from odc_mpi.comm.reduce.mailbox import MailboxGradientStore
from odc_mpi.comm.windows.parameters import WindowParameters
from odc_mpi.comm.windows.rma import Memory, Message, Window
from odc_mpi.runtime.world import World

#: Elements of each array per owner: few, since the shard of this rank is copied or added.
SHARD_NUMEL = 256
NUM_ARRAYS = 8
REPEATS = 100


class NobodysWindow(Window):
    """Window whose messages go to MPI.PROC_NULL instead of their targets."""

    @override
    def get_messages(self, buffer: Memory, parts: Iterable[Message], base: int = 0) -> None:
        super().get_messages(buffer, to_nobody(parts), base)

    @override
    def put_messages(self, values: Memory, parts: Iterable[Message]) -> None:
        super().put_messages(values, to_nobody(parts))

    @override
    def accumulate_messages(self, values: Memory, parts: Iterable[Message], base: int = 0) -> None:
        super().accumulate_messages(values, to_nobody(parts), base)


def to_nobody(parts: Iterable[Message]) -> list[Message]:
    """Replace the targets of messages."""
    return [(MPI.PROC_NULL, start, span) for _, start, span in parts]


def least_ms(operation: Callable[[], object]) -> float:
    """Return the least CPU time of a call in milliseconds."""
    times = []
    for _ in range(REPEATS):
        began = thread_time()
        operation()
        times.append(thread_time() - began)
    return round(1e3 * min(times), 3)


def measure(num_owners: int) -> dict[str, float]:
    """Measure stores in a world that claims to have `num_owners` ranks."""
    with World() as world, patch.object(mailbox, "Window", NobodysWindow):
        world.size = num_owners
        specs = [ParameterSpec("p", (num_owners * SHARD_NUMEL,), True)]
        layouts = [FlatLayout.build("unit", specs, num_owners)] * NUM_ARRAYS
        gradient = torch.ones(layouts[0].numel)
        parameters = WindowParameters(world, torch.float32, NobodysWindow)
        accumulate = AccumulateGradientStore(world, torch.float32, NobodysWindow)
        mailboxes = MailboxGradientStore(world, torch.float32)
        stores = (parameters, accumulate, mailboxes)
        for store in stores:
            store.plan(layouts)
            store.allocate()

        def push_to_mailboxes() -> None:
            mailboxes._credits[:] = 1 << 40  # so that rings have room
            mailboxes.push(0, gradient).wait()

        milliseconds = {
            "fetch": least_ms(lambda: parameters.release(parameters.fetch(0).wait())),
            "accumulate": least_ms(lambda: accumulate.push(0, gradient).wait()),
            "mailbox": least_ms(push_to_mailboxes),
        }
        for store in reversed(stores):
            store.free()
    return milliseconds


def main() -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--owners", type=int, default=1024)
    print(json.dumps(measure(parser.parse_args().owners)))


if __name__ == "__main__":
    main()
