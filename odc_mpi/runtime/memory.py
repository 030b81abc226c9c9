"""Available host memory, and the files in /dev/shm in which MPI libraries allocate windows."""

import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from odc_mpi.errors import UserError

if TYPE_CHECKING:
    from mpi4py import MPI

#: Root directory of the Linux control groups. In version 1, it has one subdirectory per controller.
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the available host memory in bytes, subject to the limits of this process's Linux control groups.

    Limits that cannot be read are ignored. On operating systems other than Linux, the result is `sys.maxsize`.
    """
    return max(0, min([_proc_bytes("meminfo", "MemAvailable", sys.maxsize), *_cgroup_available_bytes()]))


def peak_resident_bytes() -> int:
    """Return the peak resident memory of this process in bytes, including shared memory that it has accessed."""
    # Linux counts the memory of the program that started this one in `ru_maxrss`.
    return _proc_bytes("self/status", "VmHWM", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)


def _proc_bytes(name: str, entry: str, default: int) -> int:
    """Return an entry of a file in /proc in bytes, or `default` if there is none."""
    lines = _read(Path("/proc", name)).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{entry}:")), default)


def _cgroup_available_bytes() -> Iterator[int]:
    for line in _read(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _bytes_left(CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _bytes_left(CGROUPS / controllers, path, names)


def _bytes_left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the number of bytes available in a control group and in each of its parent groups.

    `names` are those of the limit file, the usage file, and memory.stat's entry for the inactive page cache.
    """
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        limit, used = (_read(folder / name).strip() for name in names[:2])
        if limit.isdecimal() and used.isdecimal():
            # The kernel drops the inactive page cache before an allocation fails.
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            yield int(limit) - int(used) + int(stat.get(names[2], 0))
        if folder == root:
            return


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def free_shm_bytes() -> int | None:
    """Return the number of free bytes in /dev/shm, or None if it does not exist."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def check_window_memory(num_bytes: int, local_size: int, what: str) -> None:
    """Raise `UserError` if this node has too little memory, or space in /dev/shm, for `num_bytes` bytes of windows.

    This is the total size of the windows of all `local_size` ranks on the node. `what` describes the windows.
    """
    room = f"expected {num_bytes >> 20} MiB or more as room for {what} of its {local_size} ranks"
    available = available_bytes()
    if num_bytes > available:
        raise UserError(
            f"this node has {available >> 20} MiB of memory left, {room}: use more nodes or a smaller model"
        )
    free = free_shm_bytes()
    # For a single rank on a node MPI allocates windows on the heap. Without /dev/shm, MPI uses another directory or
    # reports an error.
    if local_size > 1 and free is not None and num_bytes > free:
        raise UserError(
            f"/dev/shm of this node has {free >> 20} MiB free, {room}: enlarge it (docker --shm-size, mount -o "
            "remount,size=...) or use more nodes"
        )


def startup_shm_names() -> set[str]:
    """Return the paths of the files in /dev/shm that the MPI library created in MPI_Init and mapped into this process.

    The files are named mpich_shm_* (MPICH) or sm_segment.* (Open MPI). Window files are not included.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split()[-1] for line in lines if re.search(r"/dev/shm/(mpich_shm_\w+|sm_segment\.\S+)$", line)}


def unlink(names: Iterable[str]) -> None:
    """Unlink shared-memory files, ignoring errors. All ranks on the node must already have mapped the files.

    MPI libraries unlink their files only in MPI_Finalize, so a killed or aborted job would leave megabytes in /dev/shm.
    Without a launcher, Open MPI does not even unlink them there.
    """
    for name in names:
        with suppress(OSError):
            Path(name).unlink()


def unlink_startup_shm(node_comm: "MPI.Intracomm") -> None:
    """Unlink MPI_Init's shared-memory files after all ranks on the node have mapped them. Collective."""
    # After every pair of ranks has communicated, all have mapped the files.
    node_comm.alltoall([None] * node_comm.Get_size())
    # Every rank unlinks, since any single rank could be killed before it does.
    unlink(set.intersection(*node_comm.allgather(startup_shm_names())))
