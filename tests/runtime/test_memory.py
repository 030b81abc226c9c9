import pytest

from odc_mpi.runtime import memory


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The files there are, by path; control groups are in the test's directory."""
    found = {}
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "_read", lambda path: found.get(str(path), ""))
    return found


def test_the_least_of_the_host_and_its_control_groups(files, tmp_path):
    files |= {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n",
        "/proc/self/cgroup": "0::/a/b\n",
        f"{tmp_path}/a/memory.max": "6000000\n",
        f"{tmp_path}/a/memory.current": "5000000\n",
        f"{tmp_path}/a/memory.stat": "anon 1\ninactive_file 200000\n",
        f"{tmp_path}/a/b/memory.max": "max\n",
    }
    assert memory.available_bytes() == 1_200_000
    files[f"{tmp_path}/a/memory.max"] = "10"
    assert memory.available_bytes() == 0
    del files[f"{tmp_path}/a/memory.max"]
    assert memory.available_bytes() == 8000 << 10


def test_control_groups_of_version_1(files, tmp_path):
    files |= {
        "/proc/meminfo": "MemAvailable: 8000 kB\n",
        "/proc/self/cgroup": "9:cpu,cpuacct:/job\n4:memory:/slurm/job_1/step_0\n1:name=systemd:/x:y\n0::/x\n",
        f"{tmp_path}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{tmp_path}/memory/memory.usage_in_bytes": "7000000\n",
        f"{tmp_path}/memory/slurm/job_1/memory.limit_in_bytes": "6000000\n",
        f"{tmp_path}/memory/slurm/job_1/memory.usage_in_bytes": "5000000\n",
        f"{tmp_path}/memory/slurm/job_1/memory.stat": "inactive_file 1\ntotal_inactive_file 300000\n",
    }
    assert memory.available_bytes() == 1_300_000


def test_this_host_has_some():
    assert 1 << 20 < memory.available_bytes() < 1 << 50
