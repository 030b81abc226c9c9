"""The cache of probe reports, in private files. Local; knows no MPI.

The cache is a convenience: if a file is damaged or cannot be read, a run goes on and probes.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mpi4py

from odc_mpi.files import write_text_atomic
from odc_mpi.probe.report import ProbeReport

#: Seconds that a report is valid: kernels, drivers and networks change, and the key does not show it.
MAX_AGE_S = 7 * 24 * 3600.0
#: Raised when the probe measures something else, so that reports of older versions are not read.
FORMAT = 2
#: Settings of the libraries, but not what launchers add for each job.
_SETTINGS = ("MPIR_CVAR_", "MPIR_PARAM_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "PMIX_MCA_")
_JOB_VARIABLES = ("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_PREFIXES")


def settings() -> dict[str, str]:
    """Return the environment variables that change the behaviour of an MPI library."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not name.startswith(_JOB_VARIABLES)
    }


def stack_key(library: str) -> dict[str, Any]:
    """Return the part of a cache key that is the software.

    Args:
        library: The MPI library's name and version.
    """
    return {"library": library, "mpi4py": mpi4py.__version__, "settings": settings()}


def folder() -> Path:
    """Return the directory of the cache: under $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(home) / "odc_mpi"


def load(key: dict[str, Any], max_age_s: float = MAX_AGE_S) -> ProbeReport | None:
    """Return the cached report of a key, None if there is no readable one.

    Args:
        key: The key with which the report was stored.
        max_age_s: The greatest age of the report in seconds; a week by default.
    """
    try:
        kept = json.loads(_path(key).read_text())
        fresh = 0 <= time.time() - kept["time_s"] < max_age_s
        # The whole key is compared too: its digest only names the file.
        return ProbeReport.from_dict(kept["report"]) if fresh and kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # also without a home, or nested too deeply
        return None


def store(key: dict[str, Any], report: ProbeReport) -> None:
    """Store a report, readable for this user only, completely or not at all."""
    kept = json.dumps({"key": key, "time_s": time.time(), "report": report.to_dict()})
    with suppress(OSError, RuntimeError):  # a user without an entry in passwd has no home
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text_atomic(path, kept, private=True)


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()
    return folder() / f"probe-{digest[:20]}.json"
