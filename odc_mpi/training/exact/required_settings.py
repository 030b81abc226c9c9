"""Settings that `run.exact` requires, and settings that it does not support."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils.deterministic

from odc_mpi.errors import UserError
from odc_mpi.training.settings import Config


def apply_exact_settings(config: Config) -> Config:
    """If `run.exact` is set, apply the settings that it requires. Raises `UserError` for unsupported settings."""
    if not config.run.exact:
        return config
    for setting, value, unsupported, supported in (
        ("data.balance", config.data.balance, "lb_micro", "lb_mini or dynamic"),
        ("data.context_parallel", config.data.context_parallel, "auto", "off"),
        ("model.compile", str(config.model.compile).lower(), "true", "false"),
        ("run.device", config.run.device if config.run.objective == "grpo" else "cpu", "cuda", "cpu"),
        ("rl.skip_failed_rewards", str(config.rl.skip_failed_rewards).lower(), "true", "false"),
    ):
        if value == unsupported:
            raise UserError(f"{setting}: expected {supported} with run.exact, got {value}: {_REASONS[setting]}")
    return replace(
        config,
        model=replace(config.model, reduce_dtype="fixed64"),
        run=replace(config.run, threads=config.run.threads or 1),
    )


_REASONS = {
    "data.balance": "its microbatches depend on the number of ranks",
    "model.compile": "the first kernels of a rank are compiled for one number of tokens and may round differently",
    "data.context_parallel": "its chunks depend on the number of ranks",
    "run.device": "tokens are sampled with cumulative sums, for which torch has no deterministic algorithm on a GPU",
    "rl.skip_failed_rewards": "the dropped completions may depend on how long their rewards take",
}


@contextmanager
def deterministic_algorithms(config: Config) -> Iterator[None]:
    """Context manager that makes torch use deterministic algorithms if `run.exact` is set."""
    if not config.run.exact:
        yield
        return
    filling: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    # Required by cuBLAS, which reads it when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]
