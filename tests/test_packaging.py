"""Content of an installed package: all folders, and the sources of the kernels."""

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from mpi_launch import environment
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


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist of a copy of the sources, as `make dist` builds them."""
    pytest.importorskip("setuptools")
    path = tmp_path_factory.mktemp("source")
    left_out = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, path / "copy", ignore=left_out)
    program = re.search(r"^dist: .*?-c \"(.*?)\"$", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)[1]
    run(shlex.join([sys.executable, "-c", program]), path / "copy")
    (wheel,), (sdist,) = ((path / "copy" / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


@pytest.mark.slow
def test_wheel_and_sdist_have_all_modules_and_the_sources_of_kernels(built):
    modules = {f"odc_mpi/{path}" for kind in ("*.py", "*.in") for path in files(ROOT / "odc_mpi", kind)}
    kernels = files(ROOT / "src", "*.cu*")
    content = set(zipfile.ZipFile(built[0]).namelist())
    assert modules | {f"odc_mpi/src/{path}" for path in kernels} <= content and kernels
    assert any(name.endswith("licenses/LICENSE") for name in content)
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    others = {"CITATION.cff", "LICENSE", "Makefile", "constraints.txt", "jobs/quickstart.yaml", "tests/conftest.py"}
    assert modules | {f"src/{path}" for path in kernels} | others <= names


@pytest.mark.slow
def test_the_installed_wheel_has_the_command_and_finds_the_kernels(built, tmp_path):
    """In an environment of its own, which sees the installed dependencies through a path file."""
    run(f"{sys.executable} -m venv --without-pip venv", tmp_path)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    packages.joinpath("machine.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = f"{sys.executable} -m pip --python venv/bin/python install --quiet --no-compile --no-deps --no-index"
    run(f"{pip} {built[0]}", tmp_path)
    program = "import odc_mpi.comm.kernels.native as n; print(n.source_dir(), len(n.read_source('flatten')))"
    assert run(f'venv/bin/python -c "{program}"', tmp_path).split()[0] == str(packages / "odc_mpi" / "src")
    assert run("venv/bin/odc-mpi job --help", tmp_path).startswith("usage: odc-mpi job CONFIG")


def run(command, cwd):
    # mpi4py looks for the MPI library of a wheel in the environment of its Python.
    env = environment(PYTHONPATH="", LD_LIBRARY_PATH=f"{sys.prefix}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}")
    words = shlex.split(command)
    done = subprocess.run(
        words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files(directory, pattern):
    return {path.relative_to(directory).as_posix() for path in directory.rglob(pattern) if path.is_file()}
