"""The `islands` section of the settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.training.setting_types import ONE_OR_MORE, Check

_BY = Check("1 or more", lambda value: isinstance(value, str) or ONE_OR_MORE.is_valid(value))
#: Settings, each with the value that islands do not support, the values to use instead, and the reason.
_UNSUPPORTED = {
    "run.objective": ("grpo", "sft, dpo or reward", "completions are exchanged between all ranks"),
    "data.context_parallel": ("auto", "off", "a sequence may be split across islands: set one of the two to off"),
    "comm.window_device": ("cuda", "auto or cpu", "islands exchange parameters through host memory"),
}


@dataclass(frozen=True)
class IslandsConfig:
    """Settings for islands, which are groups of ranks that together hold a full copy of the parameters."""

    by: Annotated[
        Literal["off", "node"] | int, "node: one island per node; N: islands of N ranks; off: shard over all ranks", _BY
    ] = "off"


def check_islands(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if `values` enable islands with settings that do not support them. The error names `source`."""
    if values.get("islands.by", "off") == "off":
        return
    for setting, (unsupported, expected, reason) in _UNSUPPORTED.items():
        if values.get(setting) == unsupported:
            raise UserError(f"{source}: {setting}: expected {expected} with islands.by, got {unsupported}: {reason}")
