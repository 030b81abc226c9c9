"""Content of an installed package: all folders, and the sources of the kernels."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_every_folder_is_in_the_list():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options"]["packages"].split()
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "odc_mpi").rglob("__init__.py")}
    assert listed == sorted({".".join(folder.parts) for folder in folders} | {"odc_mpi.src"})


def test_constraints_pin_every_dependency_within_its_range():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    wanted = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {}
    for pin in map(Requirement, lines):  # no index address, no path
        (version,) = pin.specifier
        assert version.operator == "==" and pin.url is None, pin
        pins.setdefault(pin.name, []).append(version.version)
    for requirement in map(Requirement, filter(None, "\n".join(wanted).splitlines())):
        for version in pins[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(version), f"{requirement}: make lock"


@pytest.mark.slow
def test_a_build_has_modules_and_the_sources_of_kernels(tmp_path):
    pytest.importorskip("setuptools")
    sources = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "odc_mpi", "src")
    for name in sources:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    command = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "--quiet",
        "build",
        "--build-lib",
        "built",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    meta_model = tmp_path / "built" / "odc_mpi"
    assert files(meta_model, "*.py") == files(ROOT / "odc_mpi", "*.py")
    assert files(meta_model / "src", "*") == files(ROOT / "src", "*") != set()
    # And they are found there, by what was built.
    program = "from odc_mpi.comm.kernels import native; print(native.source_dir(), len(native.read_source('flatten')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "built", capture_output=True, text=True)
    assert done.stdout.split()[0] == str(meta_model / "src"), done.stderr


def files(directory, pattern):
    return {path.relative_to(directory) for path in directory.rglob(pattern) if path.is_file()}
