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
        assert not work.is_done
    work.wait()
    work.wait()
    assert work.is_done and not results
