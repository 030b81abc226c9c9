"""Every kernel compiles for the GPUs that clusters have, where there is nvcc. NVRTC is tried on a GPU only."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from odc_mpi.comm.kernels import native

#: A100, and H100 or H200.
ARCHITECTURES = ["80", "90"]
SOURCES = sorted(path.stem for path in native.source_dir().glob("*.cu"))


@pytest.fixture
def nvcc():
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    return found or pytest.skip("nvcc is neither on the PATH nor in CUDA_HOME")


def test_every_source_is_known():
    assert SOURCES == ["add_segments", "flatten"]


@pytest.mark.parametrize("name", SOURCES)
def test_subnormal_numbers_are_no_zeros(nvcc, name, tmp_path):
    """With what CuPy adds to the options, what is left to the compiler to add or convert would take them so."""
    made = tmp_path / "out.ptx"
    source = native.source_dir() / f"{name}.cu"
    command = [nvcc, *native.COMPILE_OPTIONS, "-ftz=true", "-arch=sm_80", "-ptx", "-o", str(made), str(source)]
    subprocess.run(command, check=True, timeout=100)
    assert ".f32" in made.read_text() and ".ftz" not in made.read_text()


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_compiles_and_stays_in_registers(nvcc, name, tmp_path):
    """As `native` puts it to NVRTC, and as a file with its header."""
    (tmp_path / f"{name}.cu").write_text(native.read_source(name))
    targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    strict = ["-ftz=true", "-Werror", "all-warnings", "-Xptxas", "-v"]
    for source in (tmp_path / f"{name}.cu", native.source_dir() / f"{name}.cu"):
        options = [*native.COMPILE_OPTIONS, *strict, *targets, "-fatbin", "-o", str(tmp_path / "out")]
        done = subprocess.run([nvcc, *options, str(source)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        # A table of segments that is copied to a thread's own memory, or values that are, would cost much of the speed.
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
        assert frames == [("0", "0", "0")] * len(ARCHITECTURES), done.stderr
