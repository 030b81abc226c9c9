"""Stretches of flattened tensors as boxes."""

import numpy as np
import pytest

from odc_mpi.checkpoint.index import hyperslabs


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_are_the_stretch_in_order(shape):
    numel = int(np.prod(shape))
    tensor = np.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            position = start
            for first, last, box in hyperslabs(shape, start, stop):
                assert first == position < last
                found = tensor[tuple(slice(*bounds) for bounds in box)]
                assert found.ravel().tolist() == list(range(first, last))
                position = last
            assert position == stop


def test_they_are_few():
    assert len(list(hyperslabs((1000, 1000), 1500, 998_500))) == 3
    assert len(list(hyperslabs((10, 10, 10), 111, 889))) == 5
    assert [box for _, _, box in hyperslabs((4, 6), 6, 18)] == [((1, 3), (0, 6))]
