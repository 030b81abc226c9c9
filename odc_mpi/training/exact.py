"""Exact runs (`run.exact`), whose results are bitwise identical on any number of ranks. See docs/exact.md.

The numerics fingerprint of a run consists of the factors that affect the last bits of results: the processor, torch,
threads and environment variables. An exact run stores it in summary.json and in checkpoints, with the key `arithmetic`.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from odc_mpi.errors import AllRanksUserError, UserError, warn
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import Metric
from odc_mpi.runtime.world import World
from odc_mpi.shard.fixed_point import FixedPointGradients
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.rundir.resume import ResumePoint
from odc_mpi.training.settings import Config

#: Environment variables that determine which instructions are used by the libraries that torch calls.
NUMERICS_ENV_VARS = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"),
)
_CPUINFO = Path("/proc/cpuinfo")
#: Values that an exact run does not support, each with the supported ones and the reason. `run.device`: only for GRPO.
_UNSUPPORTED = {
    "data.balance": ("lb_micro", "lb_mini or dynamic", "its microbatches depend on the number of ranks"),
    "data.context_parallel": ("auto", "off", "its chunks depend on the number of ranks"),
    "model.compile": (True, "false", "kernels that are compiled for one number of tokens may round differently"),
    "run.device": ("cuda", "cpu", "tokens are sampled with cumulative sums, which are not deterministic on a GPU"),
    "rl.skip_failed_rewards": (True, "false", "the dropped completions may depend on how long their rewards take"),
}


def apply_exact_settings(config: Config) -> Config:
    """If `run.exact` is set, apply the settings that it requires. Raises `UserError` for unsupported settings."""
    if not config.run.exact:
        return config
    for key, (unsupported, supported, reason) in _UNSUPPORTED.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value == unsupported and (key != "run.device" or config.run.objective == "grpo"):
            raise UserError(f"{key}: expected {supported} with run.exact, got {str(value).lower()}: {reason}")
    return replace(
        config,
        model=replace(config.model, reduce_dtype="fixed64"),
        run=replace(config.run, threads=config.run.threads or 1),
    )


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


class ExponentCallback(Callback):
    """Saves and restores the exponents of fixed-point gradients, and reports the rounding error of those gradients."""

    metrics = (Metric("fixed64_relative_error", "relative rounding of gradients", summary="final"),)

    def __init__(self, gradient_format: FixedPointGradients, loss_normalizer: float = 1.0) -> None:
        self._gradient_format = gradient_format
        # Until `Update` divides the gradients by `loss_normalizer`, they may be larger than those of a mean loss.
        shift = math.ceil(math.log2(loss_normalizer))
        gradient_format.exponents = {index: exponent - shift for index, exponent in gradient_format.exponents.items()}

    def on_gathered(self, step: Step, gathered: MinibatchStats) -> None:
        """Add the rounding error of the gradients, relative to their magnitude, to the step's metrics."""
        step.metrics["fixed64_relative_error"] = self._gradient_format.relative_error

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents that all gradient arrays use in the next minibatch, as the entry `fixed64_exponents`."""
        return {"fixed64_exponents": list(self._gradient_format.exponents.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the exponents, if the checkpoint has any. Raises `UserError` unless there is one per array."""
        exponents = state_dict.get("fixed64_exponents")
        if exponents is None:
            return
        if len(exponents) != len(self._gradient_format.exponents):
            raise UserError(
                f"expected fixed64_exponents of {len(self._gradient_format.exponents)} arrays in the checkpoint, got "
                f"{len(exponents)}: set run.resume to never"
            )
        self._gradient_format.exponents = dict(zip(self._gradient_format.exponents, exponents, strict=True))


def check_numerics(device: str, world: World, resume_point: ResumePoint | None) -> dict[str, str]:
    """Compare the numerics fingerprints of all ranks, and return the fingerprint of this rank. Collective.

    Raises `AllRanksUserError` if the fingerprints differ, or prints a warning if they differ only in the processor. If
    `resume_point` continues this run, a change to `run.threads` raises the same error; other changes cause a warning.
    """
    current = numerics_fingerprint(device)
    fingerprints = world.gather_objects(current)
    for name, first in fingerprints[0].items():
        rank = next((rank for rank, each in enumerate(fingerprints) if each.get(name) != first), None)
        if rank is None:
            continue
        values = f"{first} on rank 0, {fingerprints[rank].get(name)} on rank {rank}"
        if name != "processor":
            raise AllRanksUserError(f"{name}: expected the same on every rank with run.exact, got {values}")
        if world.rank == 0:
            warn(f"WARNING: run.exact: processors are {values}: the last bits may depend on which rank computes what")
    previous = resume_point.metadata.get("arithmetic") if resume_point and resume_point.continues_this_run else None
    if resume_point and previous:
        changed = {name: (old, current.get(name, "none")) for name, old in previous.items() if current.get(name) != old}
        if "run.threads" in changed:
            (old, new), checkpoint = changed["run.threads"], resume_point.checkpoint.directory
            raise AllRanksUserError(
                f"run.threads: expected {old} with run.exact, as in the checkpoint {checkpoint}, got {new}: set it so, "
                f"or start a new run: run.resume {checkpoint} with another run.dir"
            )
        if changed and world.rank == 0:
            changes = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items())
            warn(f"WARNING: run.exact: {changes} since the checkpoint: last bits may differ from here on")
    return current


def numerics_fingerprint(device: str) -> dict[str, str]:
    """Return the numerics fingerprint for a device (cpu or cuda) as a dictionary that maps names to values."""
    fingerprint = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "run.threads": str(torch.get_num_threads()),
    }
    if device == "cuda":
        fingerprint["GPU"] = torch.cuda.get_device_name()
    return fingerprint | {name: os.environ.get(name, "not set") for name in NUMERICS_ENV_VARS}


def _processor() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("model name", "cpu family", "model", "stepping")
    return ", ".join(f"{name} {fields[name]}" for name in names if name in fields).removeprefix("model name ")
