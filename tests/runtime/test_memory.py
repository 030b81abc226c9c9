import subprocess
import sys

import numpy as np
import pytest
from user_errors import refused

from odc_mpi.runtime import memory


def test_the_peak_is_that_of_this_process_only():
    """Linux keeps the peak of the program that started a process in `ru_maxrss`."""
    ballast = np.ones(1 << 26)
    program = "from odc_mpi.runtime.memory import peak_resident_bytes; print(peak_resident_bytes())"
    child = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 1 << 22 < child < ballast.nbytes < memory.peak_resident_bytes()


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The files there are, by path; control groups are in the test's directory."""
    found = {}
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_read", lambda path: found.get(str(path), ""))
    return found


#: Names of the files of a control group, and the line of its inactive memory.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file 1\ntotal_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "anon 1\ninactive_file")


def group(path, names, limit, used, inactive):
    content = (f"{limit}\n", f"{used}\n", f"{names[2]} {inactive}\n")
    return {f"{path}/{name}": text for name, text in zip((*names[:2], "memory.stat"), content, strict=True)}


def test_the_least_of_the_host_and_its_control_groups(files, tmp_path):
    files |= {"/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n", "/proc/self/cgroup": "0::/a/b\n"}
    files |= group(tmp_path / "a", VERSION_2, 6000000, 5000000, 200000)
    files[f"{tmp_path}/a/b/memory.max"] = "max\n"
    assert memory.available_bytes() == 1_200_000
    files[f"{tmp_path}/a/memory.max"] = "10"
    assert memory.available_bytes() == 0
    del files[f"{tmp_path}/a/memory.max"]
    assert memory.available_bytes() == 8000 << 10


def test_control_groups_of_version_1(files, tmp_path):
    groups = "9:cpu,cpuacct:/job\n4:memory:/slurm/job_1/step_0\n1:name=systemd:/x:y\n0::/x\n"
    files |= {"/proc/meminfo": "MemAvailable: 8000 kB\n", "/proc/self/cgroup": groups}
    files |= group(tmp_path / "memory", VERSION_1, 9223372036854771712, 7000000, 0)
    files |= group(tmp_path / "memory/slurm/job_1", VERSION_1, 6000000, 5000000, 300000)
    assert memory.available_bytes() == 1_300_000


@pytest.mark.parametrize(
    ("num_bytes", "local_size", "expected"),
    [
        (3 << 20, 2, "/dev/shm of this node has 2 MiB free, expected 3 MiB or more...windows of its 2 ranks: "),
        (9 << 20, 1, "this node has 4 MiB of memory left, expected 9 MiB or more...windows of its 1"),
        (9 << 20, 2, "this node has 4 MiB of memory left"),
    ],
)
def test_windows_beyond_the_memory_of_a_node(files, monkeypatch, num_bytes, local_size, expected):
    files |= {"/proc/meminfo": "MemAvailable: 4096 kB\n", "/proc/self/cgroup": ""}
    monkeypatch.setattr(memory, "free_shm_bytes", lambda: 2 << 20)
    refused(expected, memory.check_window_memory, num_bytes, local_size, "windows")
    memory.check_window_memory(3 << 20, 1, "windows")
