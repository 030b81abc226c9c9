"""Settings of exact runs, exponents of their gradients, and the facts on which their last bits depend."""

from dataclasses import replace

import torch
from user_errors import refused

from odc_mpi.shard.fixed_point import FIRST_EXPONENT, FixedPointGradients
from odc_mpi.training import exact
from odc_mpi.training.exact import ExponentCallback, apply_exact_settings
from odc_mpi.training.settings import load

MODEL = ["--model.config.model_type=qwen2", "--data.path=unused"]


def test_it_sets_what_it_takes_and_nothing_without_it() -> None:
    config = load(None, [*MODEL, "--model.reduce_dtype=float32", "--data.balance=lb_micro"])
    assert apply_exact_settings(config) is config
    config = apply_exact_settings(load(None, [*MODEL, "--run.exact=true"]))
    assert (config.model.reduce_dtype, config.run.threads) == ("fixed64", 1)
    assert apply_exact_settings(config) == config
    given = apply_exact_settings(load(None, [*MODEL, "--run.exact=true", "--run.threads=3", "--data.balance=dynamic"]))
    assert (given.run.threads, given.data.balance) == (3, "dynamic")


def test_exponents_leave_headroom_for_a_later_division() -> None:
    gradient_format = FixedPointGradients({0: 10, 3: 20})
    ExponentCallback(gradient_format, 1000.0)
    assert gradient_format.exponents == {0: FIRST_EXPONENT - 10, 3: FIRST_EXPONENT - 10}


def test_torch_is_as_it_was_afterwards() -> None:
    config = load(None, MODEL)
    for each, wanted in ((config, False), (replace(config, run=replace(config.run, exact=True)), True)):
        with exact.deterministic_algorithms(each):
            assert torch.are_deterministic_algorithms_enabled() is wanted
        assert not torch.are_deterministic_algorithms_enabled()


def test_exponents_come_back_from_a_checkpoint() -> None:
    gradient_format = FixedPointGradients({0: 10, 3: 20})
    gradient_format.exponents = {0: 51, 3: -7}
    state = ExponentCallback(gradient_format).state_dict()
    assert state == {"fixed64_exponents": [51, -7]}
    other = FixedPointGradients({1: 10, 2: 20})
    ExponentCallback(other).load_state_dict(state)
    assert other.exponents == {1: 51, 2: -7}
    ExponentCallback(other).load_state_dict({})  # of a run without them
    assert other.exponents == {1: 51, 2: -7}
    three = ExponentCallback(FixedPointGradients({0: 1, 1: 1, 2: 1}))
    refused("fixed64_exponents of 3 arrays in the checkpoint, got 2: set run.resume", three.load_state_dict, state)


def test_it_contains_the_processor_and_forced_library_settings(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    fingerprint = exact.numerics_fingerprint("cpu")
    assert fingerprint["MKL_CBWR"] == "COMPATIBLE" and fingerprint["ONEDNN_MAX_CPU_ISA"] == "not set"
    assert fingerprint["run.threads"] == str(torch.get_num_threads()) and fingerprint["torch"] == torch.__version__
    assert fingerprint["processor"] and fingerprint["instructions"]
