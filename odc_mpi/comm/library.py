"""Which MPI library this is, and whether the launcher belongs to it."""

import os

from mpi4py import MPI

from odc_mpi.errors import UserError


def library_name(version: str) -> str:
    """Shorten what MPI_Get_library_version says to a name and a version. Local.

    The two libraries say it differently: "MPICH Version:      5.0.2" and more lines, "Open MPI v5.0.11, package: ...".
    """
    words = version.replace("Version:", "").replace(",", " ").split("\n")[0].split()
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return " ".join(words[: end + 1])


def check_launcher() -> None:
    """Notice a launcher that belongs to another MPI, under which every process believes to be rank 0 of 1. Local.

    Raises:
        UserError: It does.
    """
    sizes = {name: int(os.environ.get(name) or 1) for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")}
    name, size = max(sizes.items(), key=lambda item: item[1])
    if size > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise UserError(
            f"the launcher started {size} processes ({name}), but {library_name(MPI.Get_library_version())} sees 1: "
            "use the mpiexec of the MPI library that this Python environment has"
        )
