"""The MPI library: its name, the memory model of its windows, and which threads may call it.

mpi4py asks for MPI_THREAD_MULTIPLE when it starts MPI, unless a program has set `mpi4py.rc.thread_level`, and so does
`runtime.start.pmi`. The library may grant less:

    MPI_THREAD_MULTIPLE     all threads, at the same time: threads of ours fetch, push, serve and read the status
    MPI_THREAD_SERIALIZED   all threads, one at a time: no thread of ours calls MPI. The thread does in which torch runs
                            a backward on a GPU, since the main thread waits for it meanwhile
    below                   the main thread: the call of any other is refused, and so is a model on a GPU
"""

from mpi4py import MPI

_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


def library_name(version: str) -> str:
    """Shorten what MPI_Get_library_version says to a name and a version.

    The two libraries say it differently: "MPICH Version:      5.0.2" and more lines, "Open MPI v5.0.11, package: ...".
    """
    words = version.replace("Version:", "").replace(",", " ").split("\n")[0].split()
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return " ".join(words[: end + 1])


def memory_model(win: MPI.Win) -> str:
    """Return the memory model of a window (MPI-4.1, 12.4): unified or separate."""
    return "unified" if win.model == MPI.WIN_UNIFIED else "separate"


def thread_level() -> str:
    """Return the thread level that the library granted, by its name in the standard."""
    return _THREAD_LEVELS[MPI.Query_thread()]


def has_thread_multiple() -> bool:
    """Tell whether threads may call MPI at the same time."""
    return MPI.Query_thread() == MPI.THREAD_MULTIPLE


def has_thread_serialized() -> bool:
    """Tell whether other threads than the main one may call MPI, one at a time at least."""
    return MPI.Query_thread() >= MPI.THREAD_SERIALIZED
