"""Properties of the MPI library: its name, the memory model of its windows, and its thread level.

mpi4py requests MPI_THREAD_MULTIPLE when it starts MPI, unless a program has set `mpi4py.rc.thread_level`. Under a PMIx
launcher, `runtime.start.pmi` starts MPI and always requests MPI_THREAD_MULTIPLE. The library may grant a lower level:

    MPI_THREAD_MULTIPLE     threads of this package fetch, push, make progress and read the status
    MPI_THREAD_SERIALIZED   threads of this package call only MPI_Abort. During a backward pass on a GPU, the autograd
                            thread calls MPI while the main thread waits
    lower levels            MPI calls outside the main thread, except MPI_Abort, raise errors, as do models on a GPU
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpi4py import MPI


def library_name(version: str) -> str:
    """Shorten the result of MPI_Get_library_version, for example to "Open MPI v5.0.11"."""
    words = re.sub(r"(?i)^MPI VERSION\s*:|\bversion\b\s*:?|,", " ", version.split("\n")[0]).split()
    end = next((i for i, word in enumerate(words) if re.match(r"v?\d", word)), len(words) - 1)
    return " ".join(words[: end + 1])


def is_mpich(version: str) -> bool:
    """Return True for MPICH and the libraries based on it, such as Cray MPICH, Intel MPI and MVAPICH.

    `version` is the result of MPI_Get_library_version or of `library_name`.
    """
    named = any(name in version.lower() for name in ("mpich", "mvapich", "intel(r) mpi"))
    return named and not version.startswith("Open MPI")  # whose version contains the name of the host that built it


def loaded_files() -> list[str]:
    """Return the paths of the MPI libraries that this process has loaded, and of network devices that it has open."""
    paths = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            paths.add(str(link.readlink()))
    return select_files(paths)


def select_files(paths: Iterable[str]) -> list[str]:
    """Return the paths of MPI libraries, such as Cray's libmpi_gnu_123.so.12, and of devices of fast networks."""
    pattern = r".*/libmpi(ch)?(_\w+)?\.so[.\d]*|/dev/(cxi\d|infiniband/uverbs|hfi1_).*"
    return sorted(path for path in paths if re.fullmatch(pattern, path))


def memory_model(win: MPI.Win) -> str:
    """Return the memory model of a window (MPI-4.1, section 12.4): "unified" or "separate"."""
    return "unified" if win.model == MPI.WIN_UNIFIED else "separate"


def thread_level() -> str:
    """Return the name of the thread level that MPI granted, such as "MPI_THREAD_MULTIPLE"."""
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(f"MPI_THREAD_{name}" for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread())


def has_thread_multiple() -> bool:
    """Return True if several threads may call MPI concurrently."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def has_thread_serialized() -> bool:
    """Return True if any thread may call MPI, as long as no two threads do so concurrently."""
    return MPI.Query_thread() >= MPI.THREAD_SERIALIZED
