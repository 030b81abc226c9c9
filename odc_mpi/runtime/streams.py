"""Standard streams that tolerate closed descriptors, full disks and limited encodings. Does not use MPI."""

import io
import os
import sys
from typing import TextIO


class Output(io.FileIO):
    """Raw file for the descriptor of a standard stream. It discards all output after the first failed write.

    As a result, a full disk does not end a training run. A closed pipe still raises `BrokenPipeError`. Any other
    error from the first failed write is stored in `error`.
    """

    error: OSError | None = None

    def write(self, content: bytes) -> int:  # type: ignore[override]
        """Write or discard bytes, and return their number."""
        if self.error is None:
            try:
                return super().write(content)
            except BrokenPipeError:
                raise
            except OSError as error:
                self.error = error
        return len(content)


def open_standard_streams() -> Output:
    """Replace `sys.stdout` and `sys.stderr` with streams over `Output`, and return the `Output` for standard output.

    Characters missing from the encoding are written as escape sequences. A closed descriptor is opened on the null
    device, because otherwise the next file to be opened would become the standard stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
    outputs = [_open(1, sys.stdout), _open(2, sys.stderr)]
    sys.stdout, sys.stderr = (stream for stream, _ in outputs)
    return outputs[0][1]


def _open(descriptor: int, previous: TextIO | None) -> tuple[TextIO, Output]:
    output = Output(descriptor, "w", closefd=False)
    stream = io.TextIOWrapper(
        io.BufferedWriter(output),  # type: ignore[type-var]
        encoding=previous.encoding if previous else "utf-8",
        errors="backslashreplace",
        line_buffering=descriptor == 2 or output.isatty(),
    )
    return stream, output
