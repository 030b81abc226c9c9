"""Writing a data set and its tokenizer so that they appear complete or not at all.

Both are written into a hidden folder beside the goal, on the same file system, and renamed when finished.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from odc_mpi.errors import UserError

# Lies in tokenizer directories made here, so that no other directory is ever replaced.
_MARKER = "odc_mpi_tokenizer"


@dataclass(frozen=True)
class Staging:
    """Where the parts are written before they are published.

    Attributes:
        dataset: Path of the file to write.
        tokenizer: Path of the directory to make, where a tokenizer is to be published.
    """

    dataset: Path
    tokenizer: Path


@contextmanager
def staging(out: Path, tokenizer_directory: Path | None) -> Iterator[Staging]:
    """Offer paths to write to, and move what is there into place when the body ends well.

    On any exception the old file and the old directory stay as they were, and the hidden folder goes.

    Local.

    Args:
        out: Where the data set is to appear; its folder is created when missing.
        tokenizer_directory: Where the tokenizer is to appear; None if none is written.

    Raises:
        UserError: A foreign directory is in the way, or the place cannot be written.
    """
    if tokenizer_directory is not None:
        _check_replaceable(tokenizer_directory)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(
            f"expected OUT in a folder that can be written, got {str(out)!r} ({error}): change OUT"
        ) from error
    with folder as name:
        parts = Staging(Path(name, "dataset.h5"), Path(name, "tokenizer"))
        yield parts
        _publish(parts, out, tokenizer_directory, retired=Path(name, "retired"))


def _check_replaceable(tokenizer_directory: Path) -> None:
    """Refuse a directory that is in the way and was not made here."""
    if tokenizer_directory.exists() and not (tokenizer_directory / _MARKER).is_file():
        raise UserError(
            f"the tokenizer is to go to {str(tokenizer_directory)!r}, which exists and is not odc-mpi's: move it away, "
            "or change OUT"
        )


def _publish(parts: Staging, out: Path, tokenizer_directory: Path | None, retired: Path) -> None:
    """Move the parts into place, the data set last; if that fails, undo what was moved in reverse order.

    A directory cannot be replaced in one step, so the old one steps aside into the hidden folder first.
    """
    with ExitStack() as undo:
        if tokenizer_directory is not None:
            (parts.tokenizer / _MARKER).touch()
            if tokenizer_directory.exists():
                tokenizer_directory.rename(retired)
                undo.callback(retired.rename, tokenizer_directory)
            parts.tokenizer.rename(tokenizer_directory)
            undo.callback(tokenizer_directory.rename, parts.tokenizer)
        _sync(parts.dataset)
        parts.dataset.replace(out)
        undo.pop_all()


def _sync(path: Path) -> None:
    """Have the content on disk before the name, or a crash could leave an empty file under the good name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
