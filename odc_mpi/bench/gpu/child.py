"""The ranks of `odc-mpi bench gpu`: they measure, and tell the process that started them what they find.

    python -m odc_mpi.bench.gpu.child OPTIONS FD

A line of JSON on the file descriptor before each part and at the end, from rank 0: `result` so far, `doing` (null at
the end), `may_end`: whether that may end the process, and `error`: the one line for a person who asked for what cannot
be.
"""

import json
import os
from typing import Any

import torch

from odc_mpi.bench.gpu.benchmark import Options, measure
from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.runtime.abort import run_child
from odc_mpi.runtime.world import World


def main(argv: list[str]) -> None:
    """Measure. Collective.

    Args:
        argv: The options as JSON, and the file descriptor.
    """
    options = Options(**json.loads(argv[0]))
    with os.fdopen(int(argv[1]), "w") as out, World(timeout_s=options.timeout_s, limit="--timeout-s") as world:

        def tell(result: dict[str, Any], doing: str | None, may_end: bool = False, error: str | None = None) -> None:
            if world.rank == 0:
                told = {"result": result, "doing": doing, "may_end": may_end, "error": error}
                out.write(json.dumps(told) + "\n")
                out.flush()

        known: dict[str, Any] = {}

        def listen(result: dict[str, Any], doing: str, may_end: bool) -> None:
            known.update(result)
            tell(result, doing, may_end)

        tell({}, "starting")
        try:
            if options.ranks not in (None, world.size):
                told = f"--ranks {options.ranks}: mpiexec started {world.size}, leave --ranks out under it"
                raise AgreedError(told)
            device = world.agree(lambda: find(world.host_rank))
            tell(measure(world, device, options, listen), None)
        except AgreedError as error:
            tell(known, None, error=str(error))


def find(host_rank: int) -> Device:
    """Return this rank's device. Local.

    Raises:
        UserError: There is none.
    """
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise UserError(f"bench gpu: expected a GPU that torch sees, torch {torch.__version__}, {built}, sees none")
    device = find_device("cuda", host_rank)
    assert device is not None
    device.use()
    return device


if __name__ == "__main__":
    run_child(main)
