"""Settings of exact runs, exponents of their gradients, and the facts on which their last bits depend."""

import re
from dataclasses import replace

import pytest
import torch

from odc_mpi.errors import UserError
from odc_mpi.shard.fixed_point import FIRST_EXPONENT, FixedPointGradients
from odc_mpi.training.exact import (
    ExponentCallback,
    apply_exact_settings,
    deterministic_algorithms,
    numerics_fingerprint,
)
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


GRPO = ["--run.objective=grpo", "--rl.tokenizer=words", "--rl.reward_funcs=exact_match", "--run.exact=true"]


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        (
            "data.balance",
            "lb_micro",
            "expected lb_mini or dynamic or local_sort with run.exact true, got lb_micro: its",
        ),
        ("data.context_parallel", "auto", "expected off with run.exact true, got auto: its chunks depend"),
        ("model.compile", "true", "expected false with run.exact true, got true: "),
        ("rl.skip_failed_rewards", "true", "expected false with run.exact true, got true: the dropped completions"),
        ("run.device", "cuda", "expected auto or cpu with run.exact true, got cuda: tokens are sampled with"),
    ],
)
def test_what_breaks_it_is_refused(setting: str, value: str, words: str) -> None:
    objective = GRPO if setting in ("run.device", "rl.skip_failed_rewards") else ["--run.exact=true"]
    with pytest.raises(UserError, match=f"^command line: {re.escape(setting)}: {re.escape(words)}"):
        load(None, [*MODEL, *objective, f"--{setting}={value}"])


def test_exponents_leave_headroom_for_a_later_division() -> None:
    gradient_format = FixedPointGradients({0: 10, 3: 20})
    ExponentCallback(gradient_format, 1000.0)
    assert gradient_format.exponents == {0: FIRST_EXPONENT - 10, 3: FIRST_EXPONENT - 10}


def test_torch_is_as_it_was_afterwards() -> None:
    config = load(None, MODEL)
    exact = replace(config, run=replace(config.run, exact=True))
    for each, wanted in ((config, False), (exact, True)):
        with deterministic_algorithms(each):
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
    with pytest.raises(
        UserError, match=r"^expected fixed64_exponents of 3 arrays in the checkpoint, got 2: set run.resume"
    ):
        ExponentCallback(FixedPointGradients({0: 1, 1: 1, 2: 1})).load_state_dict(state)


def test_it_contains_the_processor_and_forced_library_settings(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    fingerprint = numerics_fingerprint("cpu")
    assert fingerprint["MKL_CBWR"] == "COMPATIBLE" and fingerprint["ONEDNN_MAX_CPU_ISA"] == "not set"
    assert fingerprint["run.threads"] == str(torch.get_num_threads()) and fingerprint["torch"] == torch.__version__
    assert fingerprint["processor"] and fingerprint["instructions"]
