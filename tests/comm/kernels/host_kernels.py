"""The kernels compiled for the host, so that what they do can be seen without a GPU: slow, and the same to the bit."""

import ctypes
import subprocess
from pathlib import Path

from odc_mpi.comm.kernels import native

#: Arguments of the kernels of each file besides segments, their number, the range and the target.
FILES = {"flatten": ["unsigned long long *largest"], "add_segments": []}
#: A quad at an address that is none's stops the test.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-fsanitize=undefined", "-fno-sanitize-recover=all"]


class HostKernels:
    """Takes the place of `native._run`.

    Attributes:
        blocks: How many blocks a launch has, whatever it asks for.
        threads: Threads of a block.
        num_launches: Number of kernels that were launched.
    """

    def __init__(self, directory: Path) -> None:
        self.blocks, self.threads = 2, 3
        self.num_launches = 0
        self._libraries = {file: ctypes.CDLL(str(_build(file, directory))) for file in FILES}

    def run(self, kernel, device, num_blocks, arguments):
        self.num_launches += 1
        table, *numbers = arguments
        kinds = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, *[ctypes.c_void_p] * (len(numbers) - 3)]
        values = [kind(int(number)) for kind, number in zip(kinds, numbers, strict=True)]
        address = ctypes.c_void_p(table.ctypes.data)
        getattr(self._libraries[kernel], f"host_{kernel}")(self.blocks, self.threads, address, *values)


def _build(file: str, directory: Path) -> Path:
    source, library = directory / f"{file}.cpp", directory / f"{file}.so"
    text = f'#include "cuda_on_host.h"\n#include "{native.source_dir() / file}.cu"\n'
    source.write_text(text + _entry(file, FILES[file]))
    include = ["-I", str(Path(__file__).parent)]
    command = ["g++", *FLAGS, "-fPIC", "-shared", "-pthread", *include, "-o", str(library), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return library


def _entry(kernel: str, more: list[str]) -> str:
    parameters = ["const Segments *segments", "int count", "long long first", "long long stop", "float *target", *more]
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters]
    return (
        f'extern "C" void host_{kernel}(int blocks, int threads, {", ".join(parameters)})\n'
        f"{{ launch(blocks, threads, {kernel}, *{', '.join(names)}); }}\n"
    )
