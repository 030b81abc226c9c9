"""The exceptions and warnings that a person reads: one line each."""

import sys


class UserError(ValueError):
    """A mistake in a configuration, a data set or a checkpoint, told in one line.

    The message says what was expected, what came, and which setting to change. The command line prints it from rank 0
    without a traceback and exits with code 2.
    """


class AllRanksUserError(UserError):
    """A `UserError` that every rank of the job raises at the same point, so that each may end in good order."""


class TrainingError(RuntimeError):
    """A run that cannot go on for a reason that its own figures tell, in one line; every rank raises it."""


class StoppedError(RuntimeError):
    """A run that ends early on request, after saving; every rank raises it."""


def file_error(error: OSError) -> UserError:
    """Return an error in one line about a file that cannot be used, such as one without permission.

    Raises:
        OSError: The same error, if it names no file: then it is not the user's mistake.
    """
    if error.filename is None:
        raise error
    return UserError(f"expected a file or directory that can be used, got {error.filename}: {error.strerror}")


def one_line_message(error: BaseException) -> str:
    """Fold an exception's message, which may have many lines, into one."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def warn(line: str) -> None:
    """Print a line that a person must see."""
    print(f"odc_mpi: {line}", file=sys.stderr, flush=True)
