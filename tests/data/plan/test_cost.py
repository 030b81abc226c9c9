import numpy as np
import pytest

from odc_mpi.data.plan.cost import CostModel, flops_cost


def test_sequence_is_a_polynomial_of_the_length():
    cost = CostModel(linear=2.0, quadratic=0.5).sequence(np.array([0, 1, 4, 2**20], dtype=np.int32))
    assert cost.tolist() == [0.0, 2.5, 16.0, 2.0**21 + 2.0**39]


def test_flops_count_the_multiplications_of_a_layer():
    """Count 2 FLOPs per multiply-add of every product, pair by pair, in a layer with 4 h² parameters."""
    length, hidden = 64, 8
    matrices = 2 * length * 4 * hidden * hidden
    pairs = sum(i + 1 for i in range(length))  # causal: token i sees itself and those before
    attention = 2 * 2 * pairs * hidden  # scores, and values
    cost = flops_cost(num_parameters=4 * hidden * hidden, num_layers=1, hidden_size=hidden)
    # The formula takes s² / 2 pairs for s (s + 1) / 2.
    assert cost.sequence([length])[0] == pytest.approx(3 * (matrices + attention), rel=1 / length)
