"""Which MPI library this is."""


def library_name(version: str) -> str:
    """Shorten what MPI_Get_library_version says to a name and a version. Local.

    The two libraries say it differently: "MPICH Version:      5.0.2" and more lines, "Open MPI v5.0.11, package: ...".
    """
    words = version.replace("Version:", "").replace(",", " ").split("\n")[0].split()
    end = next((i for i, word in enumerate(words) if any(c.isdigit() for c in word)), len(words) - 1)
    return " ".join(words[: end + 1])
