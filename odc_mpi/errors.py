"""Exceptions and warnings with one-line messages for the user."""

import sys


class UserError(ValueError):
    """Error that the user can correct, for example in a configuration, a data set or a checkpoint.

    The message is one line that names the expected value, the actual value, and the setting to change. The command
    `odc-mpi` prints it without a traceback and exits with code 2.
    """


class AllRanksUserError(UserError):
    """`UserError` that every rank raises at the same point, so that all ranks can exit cleanly."""


class TrainingError(RuntimeError):
    """Raised by every rank if training cannot continue, for example because of non-finite gradients."""


class StoppedError(RuntimeError):
    """Raised by every rank if a run ends early on request. If training had begun, a checkpoint was saved."""


def file_error(error: OSError) -> UserError:
    """Return a `UserError` for an `OSError` that concerns a file, such as a permission error.

    An error that does not name a file is re-raised unchanged, because no setting can correct it.
    """
    if error.filename is None:
        raise error
    return UserError(f"cannot use {error.filename}: {error.strerror}")


def one_line_message(error: BaseException) -> str:
    """Return the message of an exception as one line of at most 300 characters, or its type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def warn(line: str) -> None:
    """Print a warning to stderr, with the prefix `odc_mpi:`."""
    print(f"odc_mpi: {line}", file=sys.stderr, flush=True)
