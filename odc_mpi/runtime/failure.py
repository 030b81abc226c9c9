"""The report of a job's first failure, which the supervisor of `odc-mpi run` reads. Does not use MPI."""

import json
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from odc_mpi.formatting import truncate_text


def report_failure(
    error: BaseException | str, rank: int | None, host: str | None = None, activity: str = "", *, final: bool = False
) -> None:
    """Write the first failure of this job to the file that ODC_MPI_FAILURE_FILE names, if it is set.

    `rank` and `host` are those that failed, if known; by default this host. `activity` is the last status of that rank.
    `final` is True if every start would fail in this way. The file appears complete and private, and stays as it is.
    """
    path = os.environ.get("ODC_MPI_FAILURE_FILE")
    if not path:
        return
    text = " ".join((error if isinstance(error, str) else f"{type(error).__name__}: {error}").split())
    host = socket.gethostname() if host is None else host
    record = {"rank": rank, "host": host, "activity": activity, "error": truncate_text(text, 300), "final": final}
    with suppress(OSError):
        descriptor, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(record, file)
            os.link(temporary, path)  # fails if there is a report
        finally:
            Path(temporary).unlink()
