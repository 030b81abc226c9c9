"""Checks of the files that `prepare` writes: new files or existing data sets. Other files are never overwritten."""

import stat
from collections.abc import Sequence
from pathlib import Path

from odc_mpi.data.dataset.reader import is_dataset, read_origin
from odc_mpi.data.sources import DataSource, is_supported
from odc_mpi.errors import UserError, file_error, one_line_message


def check_outputs(
    paths: Sequence[Path], sources: Sequence[DataSource], tokenizer: Path | None, origin: str, force: bool
) -> list[str]:
    """Check that `prepare` may write these files, and return a line of text for each data set that it would replace.

    Raises a `UserError` if a file is an input or would become part of one, exists but is not a data set, cannot be
    accessed or, unless `force` is True, was made from sources whose digest is not `origin` (see `read_origin`).
    """
    replaced = []
    for path in paths:
        for source in sources:
            if source.is_folder and is_supported(path) and path.parent.resolve() == Path(source.name).resolve():
                raise _error("a file that is not a SOURCE", path, f"in the folder {source.name!r}")
        if not _is_regular_file(path):
            continue
        for file in [file for source in sources for file in source.files]:
            if path.samefile(file):
                raise _error("a file that is not a SOURCE", path)
        if tokenizer is not None and tokenizer.exists() and path.samefile(tokenizer):
            raise _error("a file other than that of --tokenizer", path)
        if not is_dataset(path):
            raise UserError(
                f"expected a new file or a data set as --out, got {str(path)!r} (another file, or a damaged one): "
                "change --out, or remove the file"
            )
        old_origin = read_origin(path)
        if old_origin != origin and not force:
            raise UserError(
                f"the data set {str(path)!r} was made from other sources, or by another version: change --out, or "
                "replace it with --force"
            )
        change = "other options, versions or contents" if old_origin == origin else "other sources"
        replaced.append(f"{path}: preparing it again (it has {change}, or is damaged)")
    return replaced


def write_error(error: OSError, out: Path) -> UserError:
    """Convert an `OSError` that occurred while writing `out` to a `UserError` that does not name temporary files."""
    path = Path(str(error.filename))
    if error.filename is None or ".tmp" in (path.suffix, path.parent.suffix):
        reason = error.strerror or one_line_message(error)
        return UserError(f"cannot write {str(out)!r}: {reason}: free space, or change --out")
    return file_error(error)


def _error(expected: str, path: Path, found: str = "the same file") -> UserError:
    return UserError(f"expected {expected} as --out, got {str(path)!r} ({found}): change --out")


def _is_regular_file(path: Path) -> bool:
    """Return True for a regular file, or False if `path` does not exist. Raises a `UserError` for any other path."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise _error("a file", path, "a link to a file that does not exist") from None
        return False
    except (OSError, ValueError) as error:  # no directory, no permission, a name too long, a NUL character
        raise _error("a file in a writable folder", path, str(getattr(error, "strerror", error))) from error
    if not stat.S_ISREG(mode):
        raise _error("a file", path, "a directory" if stat.S_ISDIR(mode) else "a device, FIFO or socket")
    return True
