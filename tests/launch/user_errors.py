"""User errors of a command that runs in this process."""

from odc_mpi.cli import main as cli


def user_error(capsys, *arguments):
    """Run a command that must end with exit code 2, and return the only line that it prints."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("odc-mpi: error: ") and "UserError" not in line
    return line
