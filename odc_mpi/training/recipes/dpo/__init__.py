"""Direct preference optimization, and the section `dpo` of the settings, with the names and defaults of TRL."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.formatting import did_you_mean
from odc_mpi.setting_types import NON_EMPTY_NAMES, POSITIVE, Check
from odc_mpi.training.recipes.recipe import PREFERENCE_SETTINGS, Parts, Recipe

if TYPE_CHECKING:
    from odc_mpi.training.context import RunContext

#: Losses for a pair; see `dpo.scorer`.
LossType = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "sigmoid_norm", "sft"]
_BELOW_HALF = Check("0 or more and below 0.5", lambda value: 0 <= value < 0.5)


@dataclass(frozen=True)
class DPOConfig:
    """Settings for direct preference optimization."""

    beta: Annotated[float, "scale of the log-ratios to the reference model", POSITIVE] = 0.1
    loss_type: Annotated[LossType | list[str], "loss, or several; docs/preferences.md", NON_EMPTY_NAMES] = "sigmoid"
    loss_weights: Annotated[list[float] | None, "weight of each loss; null: 1.0 each"] = None
    label_smoothing: Annotated[float, "sigmoid and robust: probability of swapped answers", _BELOW_HALF] = 0.0

    @property
    def weighted_losses(self) -> list[tuple[str, float]]:
        """Names of the losses in `loss_type`, each with its weight."""
        names = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        return list(zip(names, self.loss_weights or [1.0] * len(names), strict=True))


class DPO(Recipe):
    """Direct preference optimization on pairs of a chosen and a rejected answer."""

    name = section = "dpo"
    settings = DPOConfig
    data = "pairs"
    unit = "pairs"
    allowed = PREFERENCE_SETTINGS

    @override
    def check(self, values: Mapping[str, Any], source: str) -> None:
        types, weights = values.get("dpo.loss_type", "sigmoid"), values.get("dpo.loss_weights")
        types, known = [types] if isinstance(types, str) else types, get_args(LossType)
        for name in types:
            if name not in known:
                raise UserError(
                    f"{source}: dpo.loss_type: expected some of {', '.join(known)}, got "
                    f"{name}{did_you_mean(name, known)}"
                )
        if weights is not None and (len(weights) != len(types) or min(weights) < 0 or not any(weights)):
            raise UserError(
                f"{source}: dpo.loss_weights: expected {len(types)} weights, one for each loss in dpo.loss_type, none "
                f"below 0 and not all 0, got {weights}"
            )
        if values.get("dpo.label_smoothing") and not {"sigmoid", "robust"} & set(types):
            raise UserError(
                f"{source}: dpo.label_smoothing: expected 0 without the losses sigmoid and robust in dpo.loss_type, "
                f"got {values['dpo.label_smoothing']}"
            )

    @override
    def build(self, context: "RunContext") -> Parts:
        """Build the objective, and callbacks for the reference model and the evaluation. Collective.

        Reference log-probabilities are also read from the run directory of the resume point.
        """
        from odc_mpi.checkpoint.state import TrainingState
        from odc_mpi.data.dataset.reader import Dataset
        from odc_mpi.models.configuration import full_configuration, significant_settings
        from odc_mpi.models.token_logps import TokenLogps
        from odc_mpi.training.evaluation import ForwardPass, held_out_pass
        from odc_mpi.training.preferences.answer_logps import AnswerLogps
        from odc_mpi.training.preferences.pairs import PairEvaluator, PairObjective
        from odc_mpi.training.recipes.dpo.reference import NeededPairs, ReferenceLogps
        from odc_mpi.training.recipes.dpo.scorer import PreferenceScorer
        from odc_mpi.training.rundir.checkpointing import state_digest

        config, world, inputs, resume_point = context.config, context.world, context.inputs, context.resume_point
        model = context.model
        state = TrainingState(model, context.optimizer, world.rank)
        assert isinstance(inputs.dataset, Dataset)
        model.eval()  # disables dropout, which would change what is compared
        answer_logps = AnswerLogps(TokenLogps(model.module), inputs.model.packing.packs)

        configuration = significant_settings(full_configuration(model.module))
        settings = json.dumps([configuration, inputs.model.adapter, config.model.param_dtype], sort_keys=True)

        def model_digest() -> str:  # without `inputs`, whose files are closed before the training
            return hashlib.sha256(f"{state_digest(world, state)}{settings}".encode()).hexdigest()

        loader, held_out = inputs.sequence_loader, held_out_pass(context)
        training = ForwardPass(context, inputs.dataset)
        passes: list[tuple[ForwardPass, NeededPairs]] = [
            (training, lambda completed_steps: loader.upcoming_indices(config.run.steps - completed_steps))
        ]
        if held_out:
            passes.append((held_out, lambda _: held_out.eval_indices))
        directories = [Path(config.run.dir)]
        if resume_point:
            directories.append(resume_point.checkpoint.directory.parent.parent)
        reference = ReferenceLogps(world, answer_logps, passes, directories, model_digest, context.check_stop)
        scorers = [PreferenceScorer(answer_logps, config.dpo, values) for values in reference.values]
        evaluators = [PairEvaluator(config.run, model, held_out, scorers[1])] if held_out else []
        return Parts(PairObjective(scorers[0]), [reference, *evaluators])
