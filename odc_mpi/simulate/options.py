"""Options of simulated scenarios, with their defaults, bounds and help texts, for the command line and the simulation.

This module imports only modules that load fast, because every `odc-mpi` command imports it.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from odc_mpi.errors import UserError

#: Maximum values of options in seconds and in GB/s. Larger values are probably typos.
MAX_S = MAX_GB_PER_S = 10**6
#: Bytes per parameter that islands exchange with an outer loop, by the value of `islands.wire`. Blocks of 32 integers
#: or 4-bit numbers share a scale of 1 byte. topk sends 123 of 4,096 elements, 3 %.
WIRE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 33 / 32, "e3m0": 17 / 32, "topk": 221 / 4096}


class Option(NamedTuple):
    """Inclusive bounds and help text of an option."""

    minimum: float
    maximum: float
    help: str


_COUNT, _DEVIATION = (1, 10**5), (0, 10)
_SPEED = (0, MAX_GB_PER_S)


@dataclass(frozen=True)
class ScenarioOptions:
    """Options of a simulated run. Raises a `UserError` that names the option if a value is out of bounds.

    Attributes:
        speed_variation: Standard deviation of a rank's speed, which has a log-normal distribution with mean 1 and is
            sampled in each minibatch.
        cost_error: Standard deviation of the ratio of a sequence's true duration to its cost, which has a log-normal
            distribution with mean 1.
        num_units: Number of units, which are groups of parameters that are fetched together. In each microbatch, a unit
            is fetched twice (for the forward and the backward pass) and its gradient is pushed once.
        wire: Number format, a key of `WIRE_BYTES`, in which an outer loop sends parameters between islands.
        parameter_cache_bytes, gradient_cache_bytes: Memory per rank for units that stay in memory for a minibatch,
            and for local gradient accumulation. Gradients are assumed to be as large as parameters.
    """

    ranks: Annotated[int, Option(*_COUNT, "number of ranks")] = 8
    per_rank: Annotated[int, Option(*_COUNT, "sequences per rank and minibatch")] = 8
    lengths: str = "longalign"
    num_minibatches: Annotated[int, Option(1, 10**6, "number of simulated minibatches")] = 30
    seed: Annotated[int, Option(0, 2**63, "seed of all random numbers")] = 0
    speed_variation: Annotated[float, Option(*_DEVIATION, "standard deviation of a rank's speed; its mean is 1")] = 0.0
    cost_error: Annotated[float, Option(*_DEVIATION, "standard deviation of the ratio of time to cost")] = 0.0
    overhead_s: Annotated[float, Option(0, MAX_S, "constant seconds of a microbatch")] = 0.0
    num_units: Annotated[int, Option(1, 10**4, "units of the model")] = 28
    unit_bytes: Annotated[int, Option(0, 10**12, "bytes of a unit; 0: 1.5 B parameters in bf16 / --units")] = 0
    fetch_gb_per_s: Annotated[float, Option(*_SPEED, "speed of fetches; 0: free")] = 0.0
    push_gb_per_s: Annotated[float, Option(*_SPEED, "speed of pushes; 0: free")] = 0.0
    num_islands: Annotated[int, Option(*_COUNT, "number of islands, such as nodes; simulates islands.by, too")] = 1
    link_gb_per_s: Annotated[float, Option(*_SPEED, "speed of a rank between islands; 0: free")] = 0.0
    sync_every: Annotated[int, Option(0, 10**6, "islands.sync_every of an outer loop to simulate, too; 0: none")] = 0
    wire: str = "float32"
    parameter_cache_bytes: Annotated[int, Option(0, 10**15, "for windows: comm.parameter_cache_bytes")] = 0
    gradient_cache_bytes: Annotated[int, Option(0, 10**15, "for windows: comm.gradient_cache_bytes")] = 0

    def __post_init__(self) -> None:
        for field, (_, option) in OPTIONS.items():
            value = getattr(self, field)
            if not option.minimum <= value <= option.maximum:  # nan fails both comparisons
                bounds = f"from {option.minimum} to {option.maximum}"
                raise UserError(f"{option_name(field)}: expected a number {bounds}, got {value}")


#: Type and `Option` of each annotated field of `ScenarioOptions`, keyed by field name.
OPTIONS: dict[str, tuple[Any, Option]] = {
    field: get_args(hint)
    for field, hint in get_type_hints(ScenarioOptions, include_extras=True).items()
    if get_origin(hint) is Annotated
}


def option_name(field: str) -> str:
    """Return the command-line option that sets a field, such as `--units` for `num_units`."""
    return f"--{field.removeprefix('num_').replace('_', '-')}"
