"""Callback that saves the exponents of fixed-point gradients in checkpoints and reports the rounding error."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from odc_mpi.errors import UserError
from odc_mpi.observe.callback import Callback, Step
from odc_mpi.observe.metrics import SummaryField
from odc_mpi.shard import model as sharded
from odc_mpi.shard.gradient_format.fixed_point import FixedPointGradients


class ExponentCallback(Callback):
    """Saves and restores the exponents of fixed-point gradients, and reports their rounding error.

    Until `Update` divides the gradients by `loss_normalizer`, they are larger than those of a mean loss by up to this
    factor. The constructor therefore lowers the exponents by the base-2 logarithm of `loss_normalizer`, rounded up.
    """

    summary: ClassVar = {"fixed64_relative_error": SummaryField("fixed64_relative_error", "last")}

    def __init__(self, gradient_format: FixedPointGradients, loss_normalizer: float = 1.0) -> None:
        self._gradient_format = gradient_format
        shift = math.ceil(math.log2(loss_normalizer))
        gradient_format.exponents = {index: exponent - shift for index, exponent in gradient_format.exponents.items()}

    def on_gathered(self, step: Step, gathered: sharded.MinibatchStats) -> None:
        """Add the rounding error of the gradients, relative to their magnitude, to the metrics of the step."""
        step.metrics["fixed64_relative_error"] = self._gradient_format.relative_error

    def state_dict(self) -> dict[str, Any]:
        """Return the exponents of all gradient arrays for the next minibatch, as the entry `fixed64_exponents`."""
        return {"fixed64_exponents": list(self._gradient_format.exponents.values())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the exponents, if the checkpoint has any. Raises `UserError` unless each array has one."""
        exponents = state_dict.get("fixed64_exponents")
        if exponents is None:
            return
        if len(exponents) != len(self._gradient_format.exponents):
            raise UserError(
                f"expected fixed64_exponents of {len(self._gradient_format.exponents)} arrays in the checkpoint, got "
                f"{len(exponents)}: set run.resume to never"
            )
        self._gradient_format.exponents = dict(zip(self._gradient_format.exponents, exponents, strict=True))
