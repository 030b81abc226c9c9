"""The exponents of fixed-point gradients, from one step and one checkpoint to the next. Local."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from odc_mpi.errors import UserError
from odc_mpi.observe.metrics import Entry
from odc_mpi.observe.participant import Participant, Step
from odc_mpi.shard import model as sharded
from odc_mpi.shard.elements.fixed_point import FixedPoint


class Exponents(Participant):
    """Keeps the exponents of fixed-point gradients in checkpoints, and tells what rounding lost.

    Args:
        elements: Of the model.
        divisor: What gradients are divided by after they have been added up, at most: by so much larger ones than
            usual does a run begin with.
    """

    summary: ClassVar = {"fixed64_relative_error": Entry("fixed64_relative_error", "last")}

    def __init__(self, elements: FixedPoint, divisor: float = 1.0) -> None:
        self._elements = elements
        larger = math.ceil(math.log2(divisor))
        elements.exponents = {index: exponent - larger for index, exponent in elements.exponents.items()}

    def hear(self, step: Step, told: sharded.Minibatch) -> None:
        """Report the error. Local."""
        step.metrics["fixed64_relative_error"] = self._elements.relative_error

    def state(self) -> dict[str, Any]:
        """Return the exponents of the next minibatch. Local."""
        return {"fixed64_exponents": list(self._elements.exponents.values())}

    def load_state(self, about: Mapping[str, Any]) -> None:
        """Continue with the exponents of a checkpoint, if it has any. Local.

        Raises:
            UserError: The checkpoint is of a model with other arrays.
        """
        exponents = about.get("fixed64_exponents")
        if exponents is None:
            return
        if len(exponents) != len(self._elements.exponents):
            raise UserError(
                f"expected fixed64_exponents of {len(self._elements.exponents)} arrays in the checkpoint, got "
                f"{len(exponents)}: set run.resume to never"
            )
        self._elements.exponents = dict(zip(self._elements.exponents, exponents, strict=True))
