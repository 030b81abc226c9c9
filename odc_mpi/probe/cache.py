"""Cache for probe reports, in files that only this user can read. Damaged or unreadable reports are ignored."""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mpi4py

from odc_mpi.files import write_text_durable
from odc_mpi.probe.report import ProbeReport

#: Maximum age of a cached report, in seconds. The cache key does not cover changes to kernels, drivers or networks.
MAX_AGE_S = 7 * 24 * 3600.0
#: Version of the probe and its report, which is part of the cache key. Reports from other versions are not read.
FORMAT = 9
#: Prefixes of the environment variables that configure MPI libraries, and of those that launchers set for each job.
_SETTINGS = ("MPIR_CVAR_", "MPIR_PARAM_", "MPICH_", "OMPI_MCA_", "UCX_", "FI_", "PMIX_MCA_")
_JOB_VARIABLES = ("OMPI_MCA_num_procs", "OMPI_MCA_initial_wdir", "OMPI_MCA_PREFIXES")


def stack_key(library: str) -> dict[str, Any]:
    """Return the part of a cache key that identifies the software. `library` is MPI_Get_library_version's result."""
    return {"library": library, "mpi4py": mpi4py.__version__, "settings": mpi_settings()}


def mpi_settings() -> dict[str, str]:
    """Return the environment variables that configure MPI libraries."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not name.startswith(_JOB_VARIABLES)
    }


def cache_directory() -> Path:
    """Return the cache directory: `odc_mpi` in $XDG_CACHE_HOME, or in ~/.cache if the variable is not set."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(home) / "odc_mpi"


def load(key: dict[str, Any], max_age_s: float = MAX_AGE_S) -> ProbeReport | None:
    """Return the report for a key, or None if it is missing, damaged or older than `max_age_s` seconds."""
    try:
        cached = json.loads(_path(key).read_text())
        fresh = 0 <= time.time() - cached["time_s"] < max_age_s
        # Compare the complete key, since the file's name only has a part of its digest.
        matches = cached["key"] == key and cached["digest"] == _digest(cached["report"])
        return ProbeReport.from_dict(cached["report"]) if fresh and matches else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # also no home directory, or too deeply nested
        return None


def store(key: dict[str, Any], report: ProbeReport) -> None:
    """Store a report atomically. Errors are ignored."""
    data = report.to_dict()
    content = json.dumps({"key": key, "time_s": time.time(), "report": data, "digest": _digest(data)})
    with suppress(OSError, RuntimeError):  # a user without an entry in passwd has no home directory
        path = _path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text_durable(path, content, private=True)


def _path(key: dict[str, Any]) -> Path:
    return cache_directory() / f"probe-{_digest([FORMAT, key])[:20]}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
