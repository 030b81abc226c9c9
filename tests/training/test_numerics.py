"""Facts on which the last bits depend are recorded, and compared on resume."""

import pytest
import torch

from odc_mpi.errors import UserError
from odc_mpi.training.exact.numerics import numerics_differences, numerics_fingerprint


def test_it_contains_the_processor_and_forced_library_settings(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    own = numerics_fingerprint("cpu")
    assert own["MKL_CBWR"] == "COMPATIBLE" and own["ONEDNN_MAX_CPU_ISA"] == "not set"
    assert own["run.threads"] == str(torch.get_num_threads()) and own["torch"] == torch.__version__
    assert own["processor"] and own["instructions"]


def test_changes_since_a_checkpoint_are_reported():
    before = {"processor": "old", "torch": "1", "run.threads": "2", "GPU": "one"}
    own = {"processor": "new", "torch": "1", "run.threads": "2", "MKL_CBWR": "not set"}
    assert numerics_differences(own, before, "there") == ["processor old -> new", "GPU one -> none"]
    assert numerics_differences(before, before, "there") == []


def test_other_numbers_of_threads_are_refused():
    with pytest.raises(
        UserError, match=r"^run\.threads: expected 1 with run\.exact, as in the checkpoint there, got 2"
    ):
        numerics_differences({"run.threads": "2"}, {"run.threads": "1"}, "there")
