"""Exceptions and warnings with a message of one line for the user."""

import sys


class UserError(ValueError):
    """An error in a configuration, a data set or a checkpoint.

    The message has one line: the expected value, the actual one, and the setting to change. The command line prints it
    from rank 0 without a traceback and exits with code 2.
    """


class AllRanksUserError(UserError):
    """A `UserError` that every rank of the job raises at the same point, so that all ranks can exit cleanly."""


class TrainingError(RuntimeError):
    """A run that cannot continue, for example because of non-finite gradients; raised by every rank."""


class StoppedError(RuntimeError):
    """A run that ends early on request, after saving; raised by every rank."""


def file_error(error: OSError) -> UserError:
    """Convert an error of the operating system about a file, such as a missing permission.

    An error without a file name is raised as it is: no setting of the user is the cause.
    """
    if error.filename is None:
        raise error
    return UserError(f"cannot use {error.filename}: {error.strerror}")


def one_line_message(error: BaseException) -> str:
    """Return the message of an exception as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def warn(line: str) -> None:
    """Print a warning to stderr."""
    print(f"odc_mpi: {line}", file=sys.stderr, flush=True)
