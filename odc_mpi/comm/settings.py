"""Settings of communication: the section `comm` of a run's settings, and the argument `comm` of `shard_model`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from odc_mpi.setting_types import NOT_NEGATIVE, ONE_OR_MORE, Size, settings_of, validate_value

Reduction = Literal["auto", "accumulate", "mailbox"]


@dataclass(frozen=True)
class CommConfig:
    """Settings for the communication of parameters and gradients."""

    reduction: Annotated[Reduction, "how gradients reach their owners: MPI_Accumulate or mailbox"] = "auto"
    mailbox_bytes: Annotated[Size, "mailbox: bytes per rank for gradients sent to it", ONE_OR_MORE] = 64 << 20
    zero_copy: Annotated[Literal["auto", "off"], "read parameters of ranks on the same node without a copy"] = "auto"
    node_cache: Annotated[Literal["auto", "off"], "fetch from other nodes once for all ranks of a node"] = "auto"
    frozen_scope: Annotated[
        Literal["auto", "node", "world"], "ranks among which frozen parameters are divided; auto: node if they fit"
    ] = "auto"
    progress: Annotated[Literal["auto", "off", "thread"], "thread that makes MPI progress while this rank computes"] = (
        "auto"
    )
    window_device: Annotated[Literal["auto", "cuda", "cpu"], "run.device cuda: memory of the windows (docs/gpu.md)"] = (
        "auto"
    )
    prefetch: Annotated[int, "number of units to fetch ahead in a thread; 0: no threads", NOT_NEGATIVE] = 1
    parameter_cache_bytes: Annotated[Literal["auto"] | Size, "bytes per rank to keep units until the step end"] = "auto"
    gradient_cache_bytes: Annotated[Literal["auto"] | Size, "bytes per rank to sum gradients before the push"] = "auto"
    timeout_s: Annotated[float, "seconds to wait for a rank before the run fails", ONE_OR_MORE] = 600.0

    @property
    def is_complete(self) -> bool:
        """True if no choice needs a probe of windows in host memory."""
        return "auto" not in (self.zero_copy, self.reduction, self.progress)

    def __post_init__(self) -> None:
        """Convert values such as "64M". Raises `UserError` if a value is invalid."""
        for name, setting in settings_of(CommConfig).items():
            object.__setattr__(self, name, validate_value(f"comm.{name}", setting, getattr(self, name)))
