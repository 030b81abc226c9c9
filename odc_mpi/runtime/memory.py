"""How much memory is free on this host. Local."""

import sys
from collections.abc import Iterator
from pathlib import Path

#: Where Linux shows control groups: those of version 2, or beneath it a folder for each controller of version 1.
CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Return the bytes of memory that this process and others may still take: of the host, and of its control groups.

    What cannot be told, as on another system than Linux, is no limit. Local.
    """
    return max(0, min([_of_host(), *_of_control_groups()]))


def _of_host() -> int:
    lines = _read(Path("/proc/meminfo")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), sys.maxsize)


def _of_control_groups() -> Iterator[int]:
    """Yield what is left below the limit of each group that this process is in."""
    for line in _read(Path("/proc/self/cgroup")).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
        elif controllers == "memory":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left(CGROUPS / controllers, path, names)


def _left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
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
