"""Whether this machine has a GPU, without loading a GPU library."""

import re
from contextlib import suppress
from pathlib import Path

#: Files of NVIDIA's drivers: under Linux, and in the Windows Subsystem for Linux.
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_VERSION = Path("/proc/driver/nvidia/version")


def has_gpu() -> bool:
    """Return whether there is a driver for NVIDIA's GPUs."""
    return any(node.exists() for node in _NODES)


def driver() -> str:
    """Return the version of the driver, "unknown" if it cannot be read."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)?", _VERSION.read_text())
        if found:
            return found[0]
    return "unknown"
