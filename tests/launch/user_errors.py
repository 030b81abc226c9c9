"""Bad input: a command that ends with exit code 2 and one line, a function that raises a user error of one line.

What an error says is given as the setting, file and values that it has to name, in their order, with "..." between.
"""

import re

import pytest

from odc_mpi.cli import main as cli
from odc_mpi.errors import UserError


def says(line, words):
    """Check that a message is one line that contains the parts of `words`, and return it."""
    assert re.search(".*".join(map(re.escape, words.split("..."))), line), f"{words!r} is not in {line!r}"
    assert "\n" not in line
    return line


def refused(words, function, *arguments, error=UserError, **options):
    """Call a function that must raise a user error, and return the message."""
    with pytest.raises(error) as raised:
        function(*arguments, **options)
    return says(str(raised.value), words)


def user_error(capsys, *arguments, words="", main=cli.main):
    """Run a command that must end with exit code 2, and return the only line that it prints."""
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("odc-mpi: error: ") and "UserError" not in line
    return says(line, words)
