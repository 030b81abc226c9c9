"""Which MPI library this is, and which memory model its windows have."""

from mpi4py import MPI


def library_name(version: str) -> str:
    """Shorten what MPI_Get_library_version says to a name and a version. Local.

    The two libraries say it differently: "MPICH Version:      5.0.2" and more lines, "Open MPI v5.0.11, package: ...".
    """
    words = version.replace("Version:", "").replace(",", " ").split("\n")[0].split()
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return " ".join(words[: end + 1])


def memory_model(win: MPI.Win) -> str:
    """Return the memory model of a window (MPI-4.1, 12.4): unified or separate. Local."""
    return "unified" if win.model == MPI.WIN_UNIFIED else "separate"
