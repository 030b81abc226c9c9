"""`odc-mpi doctor` as a person runs it, and with a child that crashes, hangs or aborts."""

import json
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from mpi_launch import finish, launch, odc_mpi, start
from processes import command_line

from odc_mpi.probe import doctor
from odc_mpi.probe.decision import decide
from odc_mpi.probe.report import DEVICE_OPERATIONS, OPERATION_NAMES, OPERATIONS, ProbeReport

FIGURES = {"one_sided", "idle_s", "busy_s", "gb_per_s", "num_fresh_reads"}

DOCTOR = """
import sys
from odc_mpi.probe import doctor
doctor.PROBE = [sys.executable, sys.argv[1]]
doctor.DEADLINE_S, doctor.OPERATION_S = float(sys.argv[2]), float(sys.argv[3])
sys.exit(doctor.doctor("--json" in sys.argv))
"""

#: Goes wrong at the second operation, a Put, on one rank.
BAD = """
import ctypes, os, signal, sys, time
from odc_mpi.runtime.start import launch
from odc_mpi.probe import probe, trial
run, tried = trial.Trials.run, []
def failing(self, name, kind):
    tried.append(name)
    if len(tried) == 2 and self._world.rank == {rank}:
        {fault}
    return run(self, name, kind)
trial.Trials.run = failing
print("noise on standard output")
print("some last words", file=sys.stderr, flush=True)
launch.child_main(probe.main)
"""

SEGFAULT = "os.kill(os.getpid(), signal.SIGSEGV)"
HANG = "time.sleep(3600)"
HANG_WITH_THE_GIL = "ctypes.PyDLL(None).sleep(3600)"
ABORT = "probe.MPI.COMM_WORLD.Abort(3)"
RAISE = "raise RuntimeError('made to fail')"


@pytest.fixture
def start_bad_doctor(tmp_path):
    """Start the doctor with a child of which one rank goes wrong."""
    (tmp_path / "doctor.py").write_text(DOCTOR)

    def begin(fault, rank=1, ranks=2, deadline_s=40, operation_s=30):
        (tmp_path / "bad.py").write_text(BAD.format(fault=fault, rank=rank))
        limits = (deadline_s, operation_s)
        return start(ranks, tmp_path / "doctor.py", tmp_path / "bad.py", *limits, "--json", timeout_s=100)

    return begin


def answer(done):
    """The one JSON object on standard output; a launcher that saw a crash may add to it only on standard error."""
    return json.loads(done.out)


def check_get_alone_was_answered(found, how):
    peer = found["peers"]["same_node"]
    assert peer["get"]["one_sided"] is True
    for name in ("put", "accumulate", "fetch_and_op"):
        assert peer[name] == dict.fromkeys(FIGURES)
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith("same_node put: ")
    assert how in found["problems"][0]
    assert found["decision"]["reduction"]["choice"] == "accumulate", "neither answered"
    assert found["decision"]["progress"]["choice"] == "thread"


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The answer of the doctor on two ranks, and the variables that say where it is kept, and for what."""
    home = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "FI_PROVIDER": "tcp"}
    done = odc_mpi(2, "doctor", "--json", **home)
    assert done.code == 0, done.err
    assert done.seconds < 60
    return answer(done), home


@pytest.mark.library
def test_json(healthy):
    found, _ = healthy
    assert found["ranks_per_node"] == [2]
    assert found["nodes"] == 1
    assert found["thread_level"] == "MPI_THREAD_MULTIPLE"
    assert "FI_PROVIDER=tcp" in found["variables"]
    assert [path for path in found["files"] if Path(path).name.startswith("libmpi") and Path(path).exists()]
    assert found["memory_model"] == "unified"
    assert found["problems"] == []
    choices = {name: made["choice"] for name, made in found["decision"].items()}
    assert choices == {
        "window": "allocate_shared",
        "zero_copy": "on",
        "reduction": "accumulate",
        "progress": "off",
        "node_cache": "off",
    }
    assert found["peers"]["other_node"] is None
    assert found["device"] is None and "device_decision" not in found
    assert found["peers"]["same_node"].keys() == set(OPERATIONS)
    for operation in found["peers"]["same_node"].values():
        assert operation.keys() == FIGURES
        assert operation["one_sided"] is True
        assert 0 < operation["busy_s"] < 0.1 and 0 < operation["idle_s"] < 0.1 and operation["gb_per_s"] > 0


@pytest.mark.library
@pytest.mark.quick
def test_the_table_fits_a_terminal():
    done = odc_mpi(2, "doctor", COLUMNS="80")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.strip().startswith("same node")]
    assert [row[2] for row in rows] == ["Get", "Put", "Fetch_and_op", "Accumulate"]
    assert all(row[-1] == "yes" for row in rows)
    assert sum(line.split()[:2] == ["progress", "off"] for line in lines) == 1, "one voice"


@pytest.mark.parametrize(("variable", "warned"), [("FI_PROVIDER=cxi", 1), ("FI_MR_CACHE_MONITOR=userfaultfd", 0)])
def test_the_variable_without_which_slingshot_hangs(capsys, variable, warned):
    report = ProbeReport(library="MPICH 4.1", files=("/dev/cxi0", "/opt/libmpi_gnu_123.so.12"), variables=(variable,))
    doctor._print_tables(report, decide(report), None)
    assert capsys.readouterr().out.count("set FI_MR_CACHE_MONITOR=userfaultfd") == warned


def test_a_library_with_another_name(tmp_path):
    """As in a container that is given Cray's library, for which mpi4py has a variable."""
    library, other = Path(sys.prefix, "lib", "libmpi.so.12"), tmp_path / "libmpi_gnu_123.so.12"
    if not library.exists():
        pytest.skip("there is no MPICH from the package registry here")
    shutil.copy(library, other)
    done = odc_mpi(0, "doctor", "--json", MPI4PY_LIBMPI=other, LD_LIBRARY_PATH=library.with_name("mpich"))
    assert answer(done)["files"] == [str(other)]


def test_a_single_rank_says_how_to_start_a_peer():
    done = odc_mpi(0, "doctor")
    assert done.code == 0, done.err
    assert "mpiexec -n 2 odc-mpi doctor" in done.out and "same node" not in done.out
    assert ["reduction", "mailbox"] in [line.split()[:2] for line in done.out.splitlines()]


def check_table(found, capsys):
    """Print the table of what was found."""
    report = ProbeReport.from_dict({name: value for name, value in found.items() if name != "decision"})
    doctor._print_tables(report, decide(report), None)
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[2]: line for line in lines if line.strip().startswith("same node")}
    assert rows["Get"].split()[-1] == "yes"
    assert "crashed" in rows["Put"]
    assert "not tried" in rows["Accumulate"] and "not tried" in rows["Fetch_and_op"]


@pytest.mark.library
@pytest.mark.parametrize(
    ("fault", "rank", "ranks", "how"),
    [
        pytest.param(SEGFAULT, 1, 3, "(SIGSEGV on rank 1)", marks=pytest.mark.quick),
        (RAISE, 0, 2, "(exit code 1 on rank 0)"),
        (ABORT, 1, 2, "("),
    ],
    ids=["segfault", "exception", "abort"],
)
def test_a_crash_is_an_answer(start_bad_doctor, capsys, fault, rank, ranks, how):
    done = finish(start_bad_doctor(fault, rank, ranks))
    check_get_alone_was_answered(answer(done), f"crashed {how}")
    check_table(answer(done), capsys)
    assert "some last words" in done.err
    assert done.seconds < 25, "reported at once, not at a deadline"


@pytest.mark.library
@pytest.mark.parametrize(
    ("fault", "rank", "limit", "seconds"),
    [(HANG, 1, "operation_s", 4), (HANG_WITH_THE_GIL, 0, "operation_s", 4), (HANG, 1, "deadline_s", 8)],
    ids=["waiting-1", "stuck-0", "waiting-1 for the whole"],
)
def test_a_hang_is_an_answer(start_bad_doctor, fault, rank, limit, seconds):
    done = finish(start_bad_doctor(fault, rank, **{limit: seconds}))
    check_get_alone_was_answered(answer(done), f"no answer within {seconds} s")
    assert done.seconds < 25


@pytest.mark.library
def test_an_mpi_that_does_not_start(tmp_path):
    (tmp_path / "doctor.py").write_text(DOCTOR)
    (tmp_path / "bad.py").write_text("raise SystemExit('cannot start')")
    done = launch(2, tmp_path / "doctor.py", tmp_path / "bad.py", 20, 20, "--json")
    assert done.code != 0
    found = answer(done)
    assert found["library"] is None and found["decision"] is None
    assert found["problems"][0].startswith("starting MPI: crashed (exit code 1 on rank ")
    assert "cannot start" in done.err


@pytest.mark.library
def test_a_signal_ends_it_without_leftovers(start_bad_doctor, tmp_path):
    """As from a launcher, or a person who does not want to wait."""
    job = start_bad_doctor(HANG, deadline_s=60, operation_s=60)
    child = str(tmp_path / "bad.py")
    job.wait_until(lambda: sum(child == command_line(pid)[1] for pid in job.processes()) == 2)
    time.sleep(1)
    job.send_signal(signal.SIGTERM)
    assert finish(job, 20).seconds < 15


#: As on a machine with GPUs, host memory in their place; the library cannot accumulate from a device.
DEVICE = """
import os, signal, sys, time
sys.path.insert(0, {fakes!r})
from late_device import LateDevice
from odc_mpi.runtime.start.launch import child_main
from odc_mpi.errors import UserError
from odc_mpi.probe import device_probe, probe, trial
def refuse(*arguments):
    raise UserError("CUDA cannot map it")
if {fault!r} != "pass":
    LateDevice.map = refuse
probe.device_on_all_ranks = lambda world: LateDevice()
probe.FULL = device_probe.BUDGET = probe.QUICK
run = trial.Trials.run
def failing(self, name, kind):
    if name == "accumulate" and isinstance(self._memory, device_probe.DeviceBuffer) and self._world.rank == 1:
        {fault}
    return run(self, name, kind)
trial.Trials.run = failing
child_main(probe.main)
"""


#: How fast host memory is that stands in for a device, beside itself, says nothing.
ANY_SPEED = "from odc_mpi.probe import device_decision\ndevice_decision.MIN_SHARE_OF_HOST = 0.0\n"


@pytest.fixture
def device_doctor(tmp_path):
    (tmp_path / "doctor.py").write_text(ANY_SPEED + DOCTOR)

    def run(fault, *options):
        fakes = str(Path(__file__).parents[2] / "fakes")
        (tmp_path / "device.py").write_text(DEVICE.format(fault=fault, fakes=fakes))
        home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "80"}
        child = (tmp_path / "doctor.py", tmp_path / "device.py", 60, 30)
        done = launch(2, *child, *options, timeout_s=100, **home)
        kept = [json.loads(path.read_text()) for path in (tmp_path / "cache").rglob("*.json")]
        return done, kept

    return run


def test_missing_abilities_of_a_device_are_a_stored_answer(device_doctor):
    how = "crashed (SIGSEGV on rank 1)"
    done, kept = device_doctor(SEGFAULT, "--json")
    found = answer(done)
    device = found["device"]
    assert device["window"] is True and device["own_accumulate"] is None
    assert device["mapping_error"] == "CUDA cannot map it"
    assert device["peers"]["same_node"]["put"]["idle_s"] > 0
    assert device["peers"]["same_node"]["accumulate"]["idle_s"] is None
    (problem,) = found["problems"]
    assert problem.startswith("device same_node accumulate: ") and how in problem
    assert found["peers"]["same_node"]["accumulate"]["one_sided"] is True, "of host memory all is known"
    assert found["device_decision"]["window_device"]["choice"] == "cuda"
    assert found["device_decision"]["reduction"]["choice"] == "mailbox" and how in str(found["device_decision"])
    (verdict,) = kept
    report = ProbeReport.from_dict({name: value for name, value in found.items() if not name.endswith("decision")})
    assert ProbeReport.from_dict(verdict["report"]) == report
    assert [name for _, name in verdict["key"]["devices"]] == ["late device"] * 2


def test_the_table_of_devices_fits_a_terminal(device_doctor):
    done, kept = device_doctor("pass")
    assert done.code == 0, done.err
    assert max(map(len, done.out.splitlines())) <= 80
    rows = [line.split() for line in done.out.splitlines() if line.strip().startswith("same node")]
    assert [row[2] for row in rows] == [OPERATION_NAMES[name] for name in (*OPERATIONS, *DEVICE_OPERATIONS)]
    assert "late device" in done.out and "created: yes, Accumulate to self: yes" in done.out
    kinds = [False] if "too busy to decide" in done.out else [False, True]
    assert sorted(report["report"]["device"] is None for report in kept) == kinds, "for two kinds of run"
    chosen = [line.split()[:2] for line in done.out.splitlines()]
    assert [row for row in chosen if row[:1] in (["with"], ["window"])][-2:] == [
        ["with", "run.device"],
        ["window", "map"],
    ]
    assert ["mapped", "by"] in chosen and ["window-device", "cuda"] in chosen


READS = """
import json
from odc_mpi import World
from odc_mpi.probe import probe
def fail(*arguments):
    raise AssertionError("there was a report to read")
probe.probe = fail
with World() as world:
    report = probe.cached_or_new_report(world)
    if world.rank == 0:
        print(json.dumps(report.to_dict()))
"""


@pytest.mark.library
def test_a_run_in_the_same_layout_takes_what_the_doctor_found(healthy):
    found, home = healthy
    read = answer(launch(2, "-c", READS, timeout_s=60, **home))
    assert read["peers"] == found["peers"]
    other = launch(3, "-c", READS, timeout_s=60, **home)
    assert "there was a report to read" in other.err, "ranks are laid out differently"
