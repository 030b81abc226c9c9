"""Training with one sequence per microbatch: the losses are those of the same model trained packed."""

import pytest
from small_training import configure, train_to_the_end

from odc_mpi.models import families

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3)]


@pytest.mark.parametrize(("balance", "exact"), [("lb_mini", False), ("dynamic", True)])
def test_losses_are_those_of_packed_training(world, dataset_path, base, monkeypatch, balance, exact):
    """Also in evaluations. The model refuses a microbatch of more than one sequence."""
    changes = {"data.balance": balance, "data.eval_path": dataset_path, "run.eval_every": 2, "run.exact": exact}
    packed, _ = train_to_the_end(configure(dataset_path, **changes, **{"run.dir": base / "packed"}), world)
    monkeypatch.setattr(families, "_unpacked_reason", lambda module: "a test")
    alone, _ = train_to_the_end(configure(dataset_path, **changes, **{"run.dir": base / "alone"}), world)
    for name in ("loss", "eval_loss"):
        expected, found = ([line[name] for line in lines if name in line] for lines in (packed, alone))
        assert expected and found == pytest.approx(expected, rel=1e-5)
