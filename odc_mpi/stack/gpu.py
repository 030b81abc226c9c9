"""Whether this machine has a GPU, found out without loading anything that is made for one. Local."""

import re
from contextlib import suppress
from pathlib import Path

#: Where NVIDIA's drivers show themselves: under Linux, and in a Linux within Windows.
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_VERSION = Path("/proc/driver/nvidia/version")


def has_gpu() -> bool:
    """Tell whether there is a driver for NVIDIA's GPUs. Local."""
    return any(node.exists() for node in _NODES)


def driver() -> str:
    """Return the version of the driver, "unknown" where it does not tell. Local."""
    with suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)?", _VERSION.read_text())
        if found:
            return found[0]
    return "unknown"
