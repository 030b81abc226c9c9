"""/dev/shm, where windows on host memory live: whether there is room, and what must not stay there."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from odc_mpi.errors import UserError


def check_room(wanted: int, local_size: int, what: str) -> None:
    """Check that /dev/shm has room for what the ranks of this node want to put there. Local.

    Args:
        wanted: Bytes, by all ranks of the node together.
        local_size: Ranks of the node.
        what: What for, to follow "room for".

    Raises:
        UserError: There is too little.
    """
    # One rank on a node needs no memory that others can see: MPI takes it from the heap.
    if local_size == 1:
        return
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return  # Not every system keeps shared memory there; MPI will find its own place or say so.
    if wanted > free:
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free, expected at least {wanted >> 20} MiB as room for {what} of this "
            f"node's {local_size} ranks: enlarge it (docker --shm-size, mount -o remount,size=...) or use more nodes"
        )


def unlink_startup_memory() -> None:
    """Remove the names of what MPICH mapped at its start; every rank of the node has it open by now. Local.

    MPICH removes them itself, but only in MPI_Finalize: a job that was killed or aborted would leave megabytes in
    /dev/shm each time. Its windows have no names from the beginning.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return
    for name in {line.split()[-1] for line in lines if re.search(r"/dev/shm/mpich_shm_\w+$", line)}:
        with suppress(OSError):
            Path(name).unlink()
