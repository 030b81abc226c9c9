"""Supervised fine-tuning."""

from typing import TYPE_CHECKING

from typing_extensions import override

from odc_mpi.training.recipes.recipe import Parts, Recipe

if TYPE_CHECKING:
    from odc_mpi.training.context import RunContext


class SFT(Recipe):
    """Supervised fine-tuning on prepared sequences."""

    name = "sft"
    data = "sequences"
    unit = "sequences"
    counts_flops = True

    @override
    def learning_rate(self, *, from_scratch: bool, has_adapters: bool) -> float:
        return 1e-4 if has_adapters or from_scratch else 2e-5

    @override
    def build(self, context: "RunContext") -> Parts:
        from odc_mpi.models.token_logps import TokenLogps
        from odc_mpi.training.evaluation import held_out_pass
        from odc_mpi.training.recipes.sft.objective import LossEvaluator, SFTObjective

        model, held_out = context.model, held_out_pass(context)
        evaluators = [LossEvaluator(context.config.run, model, held_out, TokenLogps(model.module))] if held_out else []
        return Parts(SFTObjective(model.module), evaluators)
