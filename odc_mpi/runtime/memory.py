"""Memory of this host: how much is free, and what is in /dev/shm, where windows on host memory live."""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

#: Where Linux shows control groups: those of version 2, or beneath it a folder for each controller of version 1.
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes of memory that this process and others may still take: of the host, and of its control groups.

    What cannot be told, as on another system than Linux, is no limit.
    """
    return max(0, min([_host_available_bytes(), *_cgroup_available_bytes()]))


def _host_available_bytes() -> int:
    lines = _read(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), sys.maxsize)


def _cgroup_available_bytes() -> Iterator[int]:
    """Yield what is left below the limit of each group that this process is in."""
    for line in _read(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _bytes_left(CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _bytes_left(CGROUPS / controllers, path, names)


def _bytes_left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield what is left below the limit of a group, and of those that it is in.

    Args:
        root: Of the groups.
        path: Of the group.
        names: The files of the limit and of the use, and the entry of memory.stat for files that were read once.
    """
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        limit, used = (_read(folder / name).strip() for name in names[:2])
        if limit.isdecimal() and used.isdecimal():
            # Files that were read once are dropped before anything fails.
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + int(stat.get(names[2], 0))
        if folder == root:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def check_shm_capacity(num_bytes: int, local_size: int, what: str) -> None:
    """Check that /dev/shm has room for the windows of this node's ranks.

    Args:
        num_bytes: Bytes for all ranks of the node together.
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
    if num_bytes > free:
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free, expected at least {num_bytes >> 20} MiB as room for {what} of this "
            f"node's {local_size} ranks: enlarge it (docker --shm-size, mount -o remount,size=...) or use more nodes"
        )


def startup_shm_names() -> set[str]:
    """Return the files in /dev/shm that the MPI library made at its start and this rank has mapped.

    Their names are mpich_shm_* (MPICH) and sm_segment.* (Open MPI). Windows have no names from the beginning.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/dev/shm/(mpich_shm_\w+|sm_segment\.\S+)$", line)}


def unlink(names: Iterable[str]) -> None:
    """Remove the names of shared memory that every rank of the node has mapped by now.

    The libraries remove them in MPI_Finalize only: a killed or aborted job would leave megabytes in /dev/shm.
    """
    for name in names:
        with suppress(OSError):
            Path(name).unlink()


def unlink_own_startup_shm(comm: "MPI.Intracomm") -> None:
    """Remove the names of the shared memory of MPI's start in a process that is alone: nobody will map it.

    Open MPI does not remove them where no launcher started the process, not even in MPI_Finalize.

    Args:
        comm: All ranks of the job; with several this does nothing, see `unlink_startup_shm`.
    """
    if comm.Get_size() == 1:
        unlink(startup_shm_names())


def unlink_startup_shm(node_comm: "MPI.Intracomm") -> None:
    """Remove the names of the shared memory that MPI made at its start: nobody else will map it. Collective."""
    # Each has spoken with each of its node, so all have mapped what the library made at its start.
    node_comm.alltoall([None] * node_comm.Get_size())
    # Each of them: one that stood in for all might be killed before it came to it.
    unlink(set.intersection(*node_comm.allgather(startup_shm_names())))
