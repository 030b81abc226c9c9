"""Content of an installed package: all folders, and the sources of the kernels."""

import ast
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
import yaml
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


#: Dependencies that recipes leave out since they are optional, or that other packages bring, and other names.
LEFT_OUT = {"package.py": {"isal"}, ".eb": {"isal", "numpy", "safetensors", "tokenizers", "typing_extensions"}}
NAMES = {"environment.yml": {"isal": "python-isal", "torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}}
NAMES[".eb"] = {"torch": "PyTorch"}


@pytest.mark.parametrize("name", ["environment.yml", "package.py", ".eb"])
def test_a_recipe_has_the_dependencies_of_the_package(name):
    (path,) = (ROOT / "jobs" / "packages").glob(f"*{name}")
    text = path.read_text()
    if name == "environment.yml":
        words = filter(lambda word: isinstance(word, str), yaml.safe_load(text)["dependencies"])
        found = dict(re.split("[>=]+", f"{word}=")[:2] for word in words)
    elif name == "package.py":
        calls = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Call) and each.args]
        found = {call.args[0].value.removeprefix("py-") for call in calls if call.func.id == "depends_on"}
        found = dict(re.split("[@:]", f"{word}@")[:2] for word in found)
    else:
        exec(text, variables := {})
        found = dict(variables["dependencies"])
    found = {canonicalize_name(key): version for key, version in found.items()}
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    for requirement in map(Requirement, config["options"]["install_requires"].split("\n")[1:]):
        if requirement.name not in LEFT_OUT.get(name, ()):
            version = found[canonicalize_name(NAMES.get(name, {}).get(requirement.name, requirement.name))]
            assert requirement.specifier.contains(version), requirement


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


@pytest.mark.skipif(
    os.environ.get("ODC_MPI_LONG") != "1" or not shutil.which("debootstrap") or os.geteuid() != 0,
    reason="downloads packages for minutes: ODC_MPI_LONG=1 as root, with debootstrap",
)
@pytest.mark.timeout(1200)
def test_the_container_is_built_in_a_root_directory(built, tmp_path):
    """The part %post of jobs/container.def, with the machine's sources of packages and the torch that tests use."""
    definition = (ROOT / "jobs" / "container.def").read_text()
    post, environment = (
        re.search(rf"^%{name}\n((?: .*\n|\n)*)", definition, re.M)[1] for name in ("post", "environment")
    )
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", root], check=True)
    (root / "opt" / "dist").mkdir()
    shutil.copy(built[0], root / "opt" / "dist")
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    (root / "opt" / "torch.txt").write_text(f"{torch}\n")
    for name in ("resolv.conf", "pip.conf", "hosts", "ssl/certs/ca-certificates.crt"):
        if (path := Path("/etc") / name).exists():
            shutil.copy(path, root / "etc" / name)
    (root / "opt" / "wheels").mkdir()
    begin = (
        f"mount --bind /opt/wheels {root}/opt/wheels 2> /dev/null; mount -t proc proc {root}/proc; exec chroot {root}"
    )
    settings = {
        "CONSTRAINT": "/opt/torch.txt",
        "FIND_LINKS": "/opt/wheels",
        "CERT": "/etc/ssl/certs/ca-certificates.crt",
    }
    export = "export " + " ".join(f"PIP_{name}={value}" for name, value in settings.items())
    for script in (f"{export}\n{post}", f"{environment}\nodc-mpi job --help"):
        words = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", f'{begin} sh -ec "$1"', "sh", script]
        subprocess.run(words, check=True, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, timeout=1000)
