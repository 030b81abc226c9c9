"""The `islands` section of the settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from odc_mpi.errors import UserError
from odc_mpi.setting_types import NOT_NEGATIVE, ONE_OR_MORE, POSITIVE, Check
from odc_mpi.training.parsing.conflicts import Conflicts

_SHARE = Check("from 0 to 1", lambda value: 0 <= value <= 1)
_PART = Check("above 0 and at most 0.25", lambda value: 0 < value <= 0.25)
_MOMENTUM = Check("from 0 up to, but not including, 1", lambda value: 0 <= value < 1)
_BY = Check("1 or more", lambda value: isinstance(value, str) or ONE_OR_MORE.is_valid(value))
ISLAND_CONFLICTS = Conflicts(
    "islands.by",
    lambda by: by != "off",
    {
        "data.context_parallel": (("off",), "a sequence may be split across islands: set one of the two to off"),
        "comm.window_device": (("auto", "cpu"), "islands exchange parameters through host memory"),
    },
)


@dataclass(frozen=True)
class IslandsConfig:
    """Settings for islands, which are groups of ranks. Each group holds a full copy of the parameters."""

    by: Annotated[
        Literal["off", "node"] | int, "node: one island per node; N: islands of N ranks; off: shard over all ranks", _BY
    ] = "off"
    mode: Annotated[
        Literal["hybrid", "outer"], "hybrid: one model, same results as off; outer: islands train apart (DiLoCo)"
    ] = "hybrid"
    sync_every: Annotated[int, "outer: steps in which each fragment is merged once", ONE_OR_MORE] = 30
    sync_when: Annotated[
        Literal["steps", "change"], "outer: change: also when gradient norms change; docs/islands.md"
    ] = "steps"
    change: Annotated[float, "sync_when change: relative change of the smoothed gradient norm", POSITIVE] = 0.05
    fragments: Annotated[int, "outer: parts of the parameters, merged at different steps", ONE_OR_MORE] = 1
    delay: Annotated[int, "outer: steps between sending a fragment and applying the result", NOT_NEGATIVE] = 0
    local_share: Annotated[float, "outer: share of its own parameters that an island keeps", _SHARE] = 0.0
    outer_learning_rate: Annotated[float, "outer: learning rate of SGD on the difference", POSITIVE] = 0.7
    outer_momentum: Annotated[float, "outer: Nesterov momentum; 0.9 for long runs", _MOMENTUM] = 0.5
    wire: Annotated[
        Literal["float32", "bfloat16", "int8", "e3m0", "topk"], "outer: format of differences sent to other islands"
    ] = "float32"
    topk: Annotated[float, "wire topk: share of the differences that is sent, the largest ones", _PART] = 0.03
    error_feedback: Annotated[bool, "outer: add rounding errors of the format to the next difference"] = False
    quorum: Annotated[
        int, "outer: merge without late islands, of at least N; 0: wait for all; docs/islands.md", NOT_NEGATIVE
    ] = 0
    grace_s: Annotated[float, "quorum: seconds to wait for further islands", NOT_NEGATIVE] = 5.0
    norm_limit: Annotated[
        float, "outer: leave out differences of more than N times the usual norm; 0: off", NOT_NEGATIVE
    ] = 10.0

    @property
    def train_apart(self) -> bool:
        """True if each island trains a model of its own."""
        return self.by != "off" and self.mode == "outer"


def check_islands(values: Mapping[str, Any], source: str) -> None:
    """Raise `UserError` if `values` (by dotted name) contradict their `islands` section. The error names `source`."""
    if values.get("islands.by", "off") == "off":
        if values.get("islands.mode") == "outer":
            raise UserError(f"{source}: islands.mode: outer requires islands, got none: set islands.by")
        return
    if values.get("islands.mode", "hybrid") == "outer":
        _check_outer(values, source)


def check_schedule(sync_every: int, fragments: int, delay: int, source: str = "") -> None:
    """Raise `UserError` unless `sync_every / fragments` is an integer above `delay`. Errors begin with `source`."""
    if sync_every % fragments:
        raise UserError(
            f"{source}islands.fragments: expected a divisor of islands.sync_every, {sync_every}, got {fragments}"
        )
    if delay >= (period := sync_every // fragments):
        raise UserError(
            f"{source}islands.delay: expected less than {period}, the number of steps between two fragments "
            f"(islands.sync_every / islands.fragments), got {delay}"
        )


def _check_outer(values: Mapping[str, Any], source: str) -> None:
    by_name = {
        name: values.get(f"islands.{name}", item.default) for name, item in IslandsConfig.__dataclass_fields__.items()
    }
    check_schedule(by_name["sync_every"], by_name["fragments"], by_name["delay"], f"{source}: ")
    if by_name["error_feedback"] and by_name["wire"] == "float32":
        raise UserError(
            f"{source}: islands.error_feedback: expected false with islands.wire float32, which loses nothing"
        )
    if by_name["wire"] == "topk" and not by_name["error_feedback"]:
        raise UserError(
            f"{source}: islands.error_feedback: expected true with islands.wire topk, which sends only a part"
        )
    if by_name["quorum"] and by_name["sync_when"] == "change":
        raise UserError(
            f"{source}: islands.quorum: expected 0 with islands.sync_when change, which makes all islands merge at "
            f"once, got {by_name['quorum']}: set islands.sync_when to steps, or islands.quorum to 0"
        )
    if by_name["sync_when"] == "change":
        for name, expected in (("fragments", 1), ("delay", 0)):
            if by_name[name] != expected:
                raise UserError(
                    f"{source}: islands.{name}: expected {expected} with islands.sync_when change, which synchronizes "
                    f"all parameters at once, got {by_name[name]}"
                )
        if values.get("optim.max_grad_norm") == 0:
            raise UserError(
                f"{source}: optim.max_grad_norm: expected a value above 0 with islands.sync_when change, which needs "
                "the gradient norm, got 0: set it, to a large value if gradients should not be clipped"
            )
