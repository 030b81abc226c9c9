"""Writing a data set and its tokenizer so that they appear complete or not at all.

Both are written into a hidden folder beside the goal, on the same file system, and renamed when finished.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from odc_mpi.errors import UserError
from odc_mpi.files import sync_file

# Lies in tokenizer directories made here, so that no other directory is ever replaced. Names the data sets, in the same
# folder, whose tokens are of that tokenizer, one a line.
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
        UserError: A foreign directory is in the way, another data set's tokenizer, or the place cannot be written.
    """
    if tokenizer_directory is not None:
        _check_replaceable(tokenizer_directory)
    missing = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    try:
        with _hidden_folder(out) as name:
            parts = Staging(Path(name, "dataset.h5"), Path(name, "tokenizer"))
            yield parts
            _publish(parts, out, tokenizer_directory, retired=Path(name, "retired"))
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # not there, or somebody else has put something into it
                folder.rmdir()
        raise


def _hidden_folder(out: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")
    except OSError as error:
        raise UserError(
            f"expected OUT in a folder that can be written, got {str(out)!r} ({error}): change OUT"
        ) from error


def _check_replaceable(tokenizer_directory: Path) -> None:
    """Refuse a directory that is in the way and was not made here."""
    if tokenizer_directory.exists() and not (tokenizer_directory / _MARKER).is_file():
        raise UserError(
            f"the tokenizer is to go to {str(tokenizer_directory)!r}, which exists and is not odc-mpi's: move it away, "
            "or change OUT"
        )


def _owners(new: Path, old: Path, out: Path) -> list[str]:
    """Return the data sets that a tokenizer will belong to; refuse to take one from others by another. Local."""
    marker = old / _MARKER
    names = marker.read_text().splitlines() if marker.is_file() else []
    others = [name for name in names if name != out.name and (out.parent / name).exists()]
    if others and _contents(new) != _contents(old):
        raise UserError(
            f"the tokenizer is to go to {str(old)!r}, where that of {others[0]} is, which has other tokens: change OUT"
        )
    return [*others, out.name]


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name != _MARKER}


def _publish(parts: Staging, out: Path, tokenizer_directory: Path | None, retired: Path) -> None:
    """Move the parts into place, the data set last; if that fails, undo what was moved in reverse order.

    A directory cannot be replaced in one step, so the old one steps aside into the hidden folder first.
    """
    with ExitStack() as undo:
        if tokenizer_directory is not None:
            owners = _owners(parts.tokenizer, tokenizer_directory, out)
            (parts.tokenizer / _MARKER).write_text("".join(f"{name}\n" for name in owners))
            if tokenizer_directory.exists():
                tokenizer_directory.rename(retired)
                undo.callback(retired.rename, tokenizer_directory)
            parts.tokenizer.rename(tokenizer_directory)
            undo.callback(tokenizer_directory.rename, parts.tokenizer)
        sync_file(parts.dataset)
        parts.dataset.replace(out)
        undo.pop_all()
