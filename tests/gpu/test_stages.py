"""A stage goes on after a test that fails in it; a stand-in launches nothing."""

import time

import pytest
import stages

TESTS = [
    "tests/mpi/device/test_gpu.py::test_a[1-x]",
    "tests/mpi/device/test_gpu.py::test_b",
    "tests/mpi/device/test_gpu.py::test_c",
]


class Scripted:
    """Collects the tests above, and ends a launch at the first that is to fail, as mpiexec does."""

    def __init__(self, failing):
        self.until, self._failing, self.launched = time.monotonic() + 60, failing, []

    def call(self, *words):
        return 0, "\n".join(TESTS) + "\n\n3 tests collected\n"

    def launch(self, ranks, *words):
        due = [word for word in words if word in TESTS]
        self.launched.append(due)
        failed = next((test for test in due if test in self._failing), None)
        return (1, f"odc_mpi: rank 0 of {ranks}: {failed} failed in call\n") if failed else (0, "3 passed\n")


@pytest.mark.parametrize(
    ("failing", "launched", "code"),
    [
        ([], [TESTS], 0),
        (TESTS[:1], [TESTS, TESTS[1:]], 1),
        (TESTS[:2], [TESTS, TESTS[1:], TESTS[2:]], 1),
        (TESTS[2:], [TESTS], 1),
    ],
)
def test_the_tests_behind_one_that_fails_are_launched_again(failing, launched, code):
    job = Scripted(failing)
    assert stages.training(job, 2, "chosen") == code
    assert [due for due in job.launched if due] == launched
