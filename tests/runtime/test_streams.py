"""Standard streams that are closed, full, or in an encoding without some characters."""

import os
import subprocess
import sys

import pytest

#: Also writes a file, which must not become the standard output.
PROGRAM = """
import sys
from odc_mpi.cli import main as module
from odc_mpi.errors import UserError

class Command:
    def run(arguments):
        with open("file", "w") as file:
            print("a", "\\u4f60", "\\udcff", flush=True)
            file.write("content")
        if arguments.fails:
            raise UserError("bad input")
        return 0
    def add_arguments(parser):
        parser.add_argument("--fails", action="store_true")
    HELP = ""

module.COMMANDS["test"] = Command
sys.exit(module.main())
"""


def run(directory, redirection, *arguments, **environment):
    command = [sys.executable, "-c", PROGRAM, "test", *arguments]
    process = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        timeout=60,
    )
    assert (directory / "file").read_text() == "content"
    return process.returncode, process.stdout.decode(), process.stderr.decode()


@pytest.mark.parametrize(
    ("environment", "text"),
    [({}, "a 你 \\udcff\n"), ({"PYTHONIOENCODING": "ascii"}, "a \\u4f60 \\udcff\n")],
    ids=["utf-8", "ascii"],
)
def test_characters_that_the_encoding_lacks_are_escaped(tmp_path, environment, text):
    assert run(tmp_path, "", **{"PYTHONUTF8": "1"} | environment) == (0, text, "")


def test_a_full_disk_under_the_output_is_an_error_at_the_end(tmp_path):
    code, _, errors = run(tmp_path, ">/dev/full")
    assert (code, errors) == (
        2,
        "odc-mpi: error: the command succeeded, but its output could not be written: No space left on device\n",
    )


def test_closed_streams_are_not_taken_by_files(tmp_path):
    assert run(tmp_path, ">&-") == (0, "", "")
    assert run(tmp_path, ">&- 2>&- <&-", "--fails") == (2, "", "")


def test_errors_keep_their_exit_code_without_an_output(tmp_path):
    assert run(tmp_path, "2>/dev/full", "--fails")[0] == 2
    assert run(tmp_path, ">/dev/full", "--fails")[::2] == (2, "odc-mpi: error: bad input\n")
