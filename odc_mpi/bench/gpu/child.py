"""The ranks of `odc-mpi bench gpu`: children (`runtime.start.launch`) that measure, and tell what they find.

Before each part and at the end rank 0 tells `result` so far, `doing`, `may_end`: whether what it does next may end the
process, and `error`: the one line for a person who asked for what cannot be.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from odc_mpi.bench.gpu.benchmark import Options, measure
from odc_mpi.bench.together import require_ranks
from odc_mpi.comm.device.device import Device, find_device
from odc_mpi.errors import AgreedError, UserError
from odc_mpi.runtime.start.launch import News, run_child
from odc_mpi.runtime.world import World


def main(arguments: Sequence[str], tell: Callable[[News], None]) -> None:
    """Measure. Collective."""
    options = Options(**json.loads(arguments[0]))
    known: dict[str, Any] = {}

    def say(doing: str | None, may_end: bool = False, error: str | None = None) -> None:
        tell({"result": known, "doing": doing, "may_end": may_end, "error": error})

    def listen(result: dict[str, Any], doing: str, may_end: bool) -> None:
        known.update(result)
        say(doing, may_end)

    with World(timeout_s=options.timeout_s, limit="--timeout-s") as world:
        say("starting")
        try:
            require_ranks(world, options.ranks)
            device = world.agree(lambda: find(world.host_rank))
            known.update(measure(world, device, options, listen))
            say(None)
        except AgreedError as error:
            say(None, error=str(error))


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
