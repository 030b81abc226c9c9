"""Descendants of a process, and whether they still run."""

from contextlib import suppress
from pathlib import Path


def is_running(pid):
    """Return True for a process that runs, False for one that has ended, even if no parent has waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def command_line(pid):
    """Return the words of the command line of a process; none if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    return [""]


def descendants(pid):
    """Return by process id what a process has started, and what that has: the words of their command lines."""
    found = {}
    with suppress(OSError):  # ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found[child] = command_line(child)
                found |= descendants(child)
    return found


def is_python(words):
    return Path(words[0]).name.startswith("python")
