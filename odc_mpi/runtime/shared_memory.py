"""/dev/shm, where windows on host memory live: a check for free space, and removal of files that would stay."""

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from odc_mpi.errors import UserError


def check_room(wanted: int, local_size: int, what: str) -> None:
    """Check that /dev/shm has room for the windows of this node's ranks. Local.

    Args:
        wanted: Bytes for all ranks of the node together.
        local_size: Number of ranks of the node.
        what: Their purpose in words that follow "room for".

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


def startup_memory() -> set[str]:
    """Return the files in /dev/shm that the MPI library made at its start and this rank has mapped. Local.

    Their names are mpich_shm_* (MPICH) and sm_segment.* (Open MPI). Windows have no names from the beginning.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/dev/shm/(mpich_shm_\w+|sm_segment\.\S+)$", line)}


def unlink(names: Iterable[str]) -> None:
    """Remove the names of shared memory that every rank of the node has mapped by now. Local.

    The libraries remove them in MPI_Finalize only: a killed or aborted job would leave megabytes in /dev/shm.
    """
    for name in names:
        with suppress(OSError):
            Path(name).unlink()
