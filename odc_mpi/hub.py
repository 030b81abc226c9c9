"""Lookup of Hugging Face Hub models in the local cache, and download of missing models into the cache.

The cache is that of huggingface_hub (HF_HOME, HF_HUB_CACHE). A download runs in a child process, which is killed if the
network does not answer: requests of huggingface_hub 2.4 to the API of the Hub have no timeout, and a thread that waits
for one cannot be ended. Pickled weights and code are neither downloaded nor used. This module does not use MPI;
`resolve_model_path` communicates only through its argument `gather`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from odc_mpi.errors import AllRanksUserError
from odc_mpi.files import parse_json

#: Pattern for OWNER/NAME (NAME for the oldest models), optionally followed by @REVISION: a branch, tag or commit.
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@([\w./-]+))?", re.ASCII)
#: Pattern for a snapshot directory in a cache, possibly on another machine. The groups are repository and commit.
_SNAPSHOT = re.compile(r".*/models--([^/]+)/snapshots/([0-9a-f]{40})/?")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_MODEL_FILES = (*_TOKENIZER_FILES, "model*.safetensors", "adapter_model.safetensors")
#: Seconds without new bytes after which a download is aborted. Without hf_xet, bytes are written in blocks of 10 MB.
STALL_S = 300.0
_POLL_S, _REPORT_S = 0.5, 10.0
#: Child program, which ends even if this process is killed, and imports nothing from the working directory.
_PROGRAM = """
import sys
sys.path[:] = [path for path in sys.path if path]
import ctypes, json, signal
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
from huggingface_hub import snapshot_download
try:
    snapshot_download(**json.loads(sys.argv[1]))
except Exception as error:
    print(" ".join(f"{type(error).__name__}: {error}".split())[:300])
    sys.exit(1)
"""


def parse_name(path: str) -> tuple[str, str | None] | None:
    """Return the name and the revision of the Hub model that `path` denotes, or None if it denotes no Hub model.

    A Hub model is denoted by the directory of its snapshot in a cache, or by NAME[@REVISION] if no such file or
    directory exists and `path` does not end with an HDF5 suffix. Without REVISION, the revision is None.
    """
    if match := _SNAPSHOT.fullmatch(path):
        return match[1].replace("--", "/"), match[2]
    match = _NAME.fullmatch(path)
    if match is None or path.endswith((".h5", ".hdf5")) or os.path.exists(path):  # noqa: PTH110 - see _find
        return None
    return match[1], match[2]


def download_hint(path: str) -> str:
    """Return the end of an error message: the command that downloads `path`, or "" if `path` is not a Hub model."""
    if (parsed := parse_name(path)) is None:
        return ""
    name, revision = parsed
    return f", or run hf download {name}" + (f" --revision {revision}" if revision else "")


def cached_model_path(path: str) -> str:
    """Return the cache directory of the Hub model `path`, or `path` if it exists locally or is not fully cached."""
    return _find(path, weights=True) or path


def resolve_model_path(
    path: str,
    setting: str,
    *,
    weights: bool = True,
    gather: Callable[[Any], list[Any]] = lambda value: [value],
    downloads: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Return a model's directory, first downloading the model if it is a Hub model that is not in the cache.

    Collective if `gather` is. A path that exists or does not denote a Hub model is returned unchanged. Raises
    `AllRanksUserError` if the model is not in the cache and cannot be downloaded.

    Args:
        setting: Name of the setting or option that specifies `path`, for the error message.
        weights: False if only the tokenizer is needed.
        gather: Function that returns the values that all ranks pass to it. The default is for a single rank.
        downloads: True on one rank per node, which downloads the model for all ranks on the node.
        report: Function that is called with lines of text about the progress of the download.
    """
    local_path = _find(path, weights)
    paths = gather(local_path)
    if path in paths and len(set(paths)) > 1:
        ranks = ", ".join(str(rank) for rank, found in enumerate(paths) if found != path)
        raise AllRanksUserError(
            f"{setting}: expected a directory that all ranks see, got {path!r}, which is missing on rank {ranks}: set "
            f"{setting} to an absolute path on a file system that all nodes share"
        )
    if None not in paths:
        assert local_path is not None
        return local_path
    # Imported late: only needed for names.
    from huggingface_hub import is_offline_mode

    download = None
    if local_path is None and downloads and not is_offline_mode():
        download = _Download(path, weights, report)
    try:
        # Every rank takes part until all downloads have ended, so no rank waits for others longer than one poll.
        while not all(gather(download is None or download.has_ended())):
            time.sleep(_POLL_S)
    finally:
        problem = download.close() if download else None
    local_path = _find(path, weights)
    missing = f"the repository lacks {'safetensors of all weights' if weights else 'a tokenizer'}"
    problem = problem or ("HF_HUB_OFFLINE is set" if is_offline_mode() else missing)
    problems = [each for each in gather(None if local_path else problem) if each]
    if problems:
        raise AllRanksUserError(
            f"{setting}: expected a directory, or a model of the Hugging Face Hub in the cache, got {path!r}, which is "
            f"neither and cannot be downloaded ({problems[0]}): correct it{download_hint(path)}"
        )
    assert local_path is not None
    return local_path


class _Download:
    """Download in a child process, which `has_ended` kills if no new bytes arrive for `STALL_S` seconds."""

    def __init__(self, path: str, weights: bool, report: Callable[[str], None]) -> None:
        from huggingface_hub import constants

        name, revision = parse_name(path) or ("", None)
        self._blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
        self._what, self._report = f"downloading {name} from the Hugging Face Hub", report
        self._problem: str | None = None
        patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
        # Other formats of the same weights are in subfolders.
        request = {"repo_id": name, "revision": revision, "allow_patterns": patterns, "ignore_patterns": ["*/*"]}
        words, null = [sys.executable, "-c", _PROGRAM, json.dumps(request)], subprocess.DEVNULL
        self._process = subprocess.Popen(words, stdin=null, stdout=subprocess.PIPE, stderr=null, text=True)
        self._num_bytes = -1
        self._grew = self._reported = time.monotonic()
        report(self._what)

    def has_ended(self) -> bool:
        """Return True if the download is complete or has failed. Otherwise, report its progress."""
        if self._process.poll() is not None:
            return True
        num_bytes, now = 0, time.monotonic()
        for file in self._blobs.glob("*"):
            with suppress(OSError):  # an incomplete file is renamed when it is complete
                num_bytes += file.stat().st_size
        if num_bytes != self._num_bytes:
            self._num_bytes, self._grew = num_bytes, now
        elif now - self._grew > STALL_S:
            self._problem = f"no bytes arrived for {STALL_S:g} s"
            self._process.kill()
        if now - self._reported > _REPORT_S:
            self._reported = now
            self._report(f"{self._what}: {num_bytes / 1e6:,.0f} MB")
        return False

    def close(self) -> str | None:
        """End the process if it is still running. Return the reason if the download has failed, otherwise None."""
        self._process.kill()
        output, _ = self._process.communicate()
        code = self._process.returncode
        return self._problem or output.strip() or (f"the download ended with exit code {code}" if code else None)


def _find(path: str, weights: bool) -> str | None:
    """Return `path` if it exists or is not a Hub model, otherwise its snapshot in the cache, or None if incomplete."""
    parsed = parse_name(path)
    if parsed is None or os.path.exists(path):  # noqa: PTH110 - Path.exists raises an error for long names
        return path
    from huggingface_hub import snapshot_download

    try:
        name, revision = parsed
        directory = snapshot_download(name, revision=revision, allow_patterns="config.json", local_files_only=True)
    except (OSError, ValueError):  # not in the cache, or not a valid name
        return None
    return directory if _is_complete(Path(directory), weights) else None


def _is_complete(directory: Path, weights: bool) -> bool:
    """Return True if a snapshot contains a tokenizer or, if `weights` is True, all files of the model."""
    if not weights:
        patterns = ("tokenizer.*", "vocab.*", "*.model", "*.tiktoken")
        return any(file.exists() for pattern in patterns for file in directory.glob(pattern))
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.exists():
        try:
            files = {str(file) for file in parse_json(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return True  # reading the model reports the error
    elif (directory / "adapter_config.json").exists():
        return (directory / "adapter_model.safetensors").exists()
    return all((directory / file).exists() for file in ("config.json", *files))
