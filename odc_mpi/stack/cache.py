"""A report kept for the next run, in a private file. Local; knows no MPI.

The cache is a convenience: whatever is wrong with it, a run goes on and probes.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from odc_mpi.files import swap_text
from odc_mpi.stack.report import Report

#: Kernels, drivers and networks change without a word of it in the key.
KEPT_S = 7 * 24 * 3600.0
#: Raised when the probe measures something else, so that what older versions kept is not read.
FORMAT = 2
#: Settings of the libraries, but not what launchers add for each job.
_SETTINGS = ("MPIR_CVAR_", "MPIR_PARAM_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "PMIX_MCA_")
_OF_THE_JOB = ("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_PREFIXES")


def settings() -> dict[str, str]:
    """Return the variables of the environment that change what an MPI library does. Local."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not name.startswith(_OF_THE_JOB)
    }


def folder() -> Path:
    """Return where reports are kept: under $XDG_CACHE_HOME or ~/.cache. Local."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(home) / "odc_mpi"


def load(key: dict[str, Any], kept_s: float = KEPT_S) -> Report | None:
    """Return the report that was kept under this key, if there is a readable one. Local.

    Args:
        key: Equal to the one with which it was stored.
        kept_s: It is at most so many seconds old; a week by default.
    """
    try:
        kept = json.loads(_path(key).read_text())
        fresh = 0 <= time.time() - kept["time_s"] < kept_s
        # The whole key is compared too: its digest only names the file.
        return Report.from_dict(kept["report"]) if fresh and kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # also without a home, or nested too deeply
        return None


def store(key: dict[str, Any], report: Report) -> None:
    """Keep a report, readable for this user only, all of it or nothing. Local."""
    kept = json.dumps({"key": key, "time_s": time.time(), "report": report.to_dict()})
    with suppress(OSError, RuntimeError):  # a user without an entry in passwd has no home
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        swap_text(path, kept, private=True)


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()
    return folder() / f"probe-{digest[:20]}.json"
