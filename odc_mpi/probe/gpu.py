"""Detection of GPUs without loading a GPU library."""

import re
from contextlib import suppress
from pathlib import Path

#: Device files of the NVIDIA drivers for Linux and for the Windows Subsystem for Linux.
_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
_VERSION = Path("/proc/driver/nvidia/version")


def has_gpu() -> bool:
    """Return True if this machine has a device file of NVIDIA's driver for Linux or WSL, and thus probably a GPU."""
    return any(node.exists() for node in _NODES)


def driver() -> str:
    """Return the version of the NVIDIA driver, or "unknown" if it cannot be read."""
    with suppress(OSError):
        if version := re.search(r"\d+\.\d+(\.\d+)?", _VERSION.read_text()):
            return version[0]
    return "unknown"
