import pytest

from odc_mpi.comm.work import Work


def test_an_operation_that_failed_is_not_done():
    results = [OSError("first"), OSError("second"), None]

    def operation():
        if (error := results.pop(0)) is not None:
            raise error

    work = Work(operation)
    for message in ("first", "second"):
        with pytest.raises(OSError, match=message):
            work.wait()
    work.wait()
    work.wait()
    assert not results
