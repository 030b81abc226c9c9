"""Detection of GPUs without loading a GPU library."""

import re
from contextlib import suppress
from pathlib import Path

#: Files of the NVIDIA drivers for Linux and for the Windows Subsystem for Linux.
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_VERSION = Path("/proc/driver/nvidia/version")


def has_gpu() -> bool:
    """Return True if this machine probably has a GPU: a device file of the NVIDIA driver for Linux or WSL exists."""
    return any(node.exists() for node in _NODES)


def driver() -> str:
    """Return the version of the NVIDIA driver, or "unknown" if it cannot be read."""
    with suppress(OSError):
        if version := re.search(r"\d+\.\d+(\.\d+)?", _VERSION.read_text()):
            return version[0]
    return "unknown"
