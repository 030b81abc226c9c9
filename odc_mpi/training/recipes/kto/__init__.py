"""Kahneman-Tversky optimization, and the section `kto` of the settings, with the names and defaults of TRL."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.setting_types import NOT_NEGATIVE, POSITIVE
from odc_mpi.training.recipes.recipe import PREFERENCE_SETTINGS, Parts, Recipe

if TYPE_CHECKING:
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.settings import Config


@dataclass(frozen=True)
class KTOConfig:
    """Settings for Kahneman-Tversky optimization, which trains on single answers that are desirable or not."""

    beta: Annotated[float, "scale of the log-ratios to the reference model", POSITIVE] = 0.1
    loss_type: Annotated[Literal["kto", "apo_zero_unpaired"], "loss; docs/preferences.md"] = "kto"
    desirable_weight: Annotated[float, "weight of the losses of desirable answers", NOT_NEGATIVE] = 1.0
    undesirable_weight: Annotated[float, "weight of the losses of undesirable answers", NOT_NEGATIVE] = 1.0


class KTO(Recipe):
    """Kahneman-Tversky optimization on prompts with one answer each, which is labeled desirable or undesirable."""

    name = section = "kto"
    settings = KTOConfig
    data = "labels"
    unit = "answers"
    allowed = PREFERENCE_SETTINGS

    @override
    def check(self, values: Mapping[str, Any], source: str) -> None:
        if values.get("kto.loss_type", "kto") == "kto" and values.get("data.minibatch_sequences", 16) < 2:
            raise UserError(
                f"{source}: data.minibatch_sequences: expected 2 or more with kto.loss_type kto, got 1: its KL "
                "estimate pairs each prompt with the answer to another one; apo_zero_unpaired has no estimate"
            )
        if not (values.get("kto.desirable_weight", 1.0) or values.get("kto.undesirable_weight", 1.0)):
            raise UserError(f"{source}: kto.desirable_weight: expected a positive weight of one kind of answers, got 0")

    @override
    def compares_with_base(self, config: "Config") -> bool:
        return config.lora.r is None

    @override
    def build(self, context: "RunContext") -> Parts:
        from odc_mpi.models.token_logps import TokenLogps
        from odc_mpi.training.evaluation import held_out_pass
        from odc_mpi.training.preferences.answer_logps import AnswerLogps
        from odc_mpi.training.recipes.kto.kl import KLEstimator
        from odc_mpi.training.recipes.kto.objective import KTOEvaluator, KTOObjective, KTOScorer
        from odc_mpi.training.reference_policy import reference_policy

        config, inputs, model = context.config, context.inputs, context.model
        model.eval()  # disables dropout, which would change what is compared
        packs = inputs.model.packing.packs
        policy = AnswerLogps(TokenLogps(model.module), packs)
        scorer = KTOScorer(policy, AnswerLogps(reference_policy(context), packs))
        kl = KLEstimator(context, scorer) if config.kto.loss_type == "kto" else None
        held_out = held_out_pass(context)
        evaluators = [KTOEvaluator(config, model, held_out, scorer, kl)] if held_out else []
        return Parts(KTOObjective(config.kto, scorer, kl), evaluators)
