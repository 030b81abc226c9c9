import pytest

from odc_mpi.bench.progress.politeness import slow_downs


def test_slow_down_is_of_rounds():
    """A slow round slows both: the ratio does not see it."""
    assert slow_downs([1.0, 10.0, 2.0], [1.05, 10.5, 1.9]) == pytest.approx([0.05, 0.05, -0.05])
