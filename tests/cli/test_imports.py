"""Start-up time of a command: the modules that it imports."""

import gc
import subprocess
import sys

import pytest

from odc_mpi.runtime.ranks import gc_paused

#: Prints which large libraries are imported when a command has ended.
COMMAND = """
import sys
from odc_mpi.cli import main as cli
try:
    code = cli.main({arguments})
except SystemExit as stop:
    code = stop.code
print("code", code, *(name for name in ("torch", "transformers", "mpi4py", "matplotlib") if name in sys.modules))
"""


@pytest.fixture
def unfrozen():
    """The collector as it was, when the test is over."""
    was_on = gc.isenabled()
    gc.unfreeze()  # what tests before this one froze
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "code 0"),
        (["--version"], "code 0"),
        (["train", "--help"], "code 0"),
        (["simulate", "--minibatches", "1"], "code 0"),
        (["simulate", "--ranks", "0"], "code 2"),
        (["run", "--min-ranks", "2", "--", "train", "--model.path", "m", "--data.path", "d"], "code 2"),
        (["train", "--config", "/nowhere.yaml"], "code 2 mpi4py"),  # all ranks agree on the mistake
        (["train", "--run.steps", "many"], "code 2 mpi4py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_imports_no_more_than_it_needs(arguments, expected):
    command = [sys.executable, "-c", COMMAND.format(arguments=arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == expected, done.stderr


def test_ranks_and_the_probe_of_the_doctor_need_no_torch():
    program = "import sys, odc_mpi.probe.probe; print('torch' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_imported_objects_are_never_collected(unfrozen, tmp_path, monkeypatch):
    (tmp_path / "imported_here_only.py").write_text("things = [[] for _ in range(1000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with gc_paused():
        import gc as again  # noqa: F401
    assert gc.get_freeze_count() == 0, "nothing was imported"
    with gc_paused():
        assert not gc.isenabled()
        import imported_here_only  # noqa: F401
    assert gc.isenabled() and gc.get_freeze_count() > 1000


def test_the_collector_is_on_again_after_a_failure_and_stays_off_where_it_was(unfrozen):
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
