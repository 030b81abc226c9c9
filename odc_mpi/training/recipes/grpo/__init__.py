"""GRPO: training from rewards for completions of prompts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.recipes.rollouts.recipe import ROLLOUT_SETTINGS, RolloutRecipe

if TYPE_CHECKING:
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.settings import Config


class GRPO(RolloutRecipe):
    """Training from rewards for completions of prompts."""

    name = "grpo"
    allowed: ClassVar = {
        **ROLLOUT_SETTINGS,
        "rl.teacher_path": ((None,), "only run.objective distill learns from a teacher"),
    }

    @override
    def compares_with_base(self, config: "Config") -> bool:
        return bool(config.rl.beta) and config.lora.r is None

    @override
    def check(self, values: Mapping[str, Any], source: str) -> None:
        if not values.get("rl.reward_funcs"):
            raise UserError(
                f"{source}: run.objective grpo requires rl.reward_funcs: set it, for example to exact_match"
            )
        if values.get("rl.num_generations") == 1:
            raise UserError(
                f"{source}: rl.num_generations: expected 2 or more with run.objective grpo, which compares the "
                "completions of a prompt with each other, got 1"
            )
        if values.get("rl.scale_rewards") == "batch" and values.get("rl.beta"):
            raise UserError(
                f"{source}: rl.scale_rewards: expected group or none with rl.beta {values['rl.beta']}, got batch: the "
                "divisor of the advantages is only known when their gradients have been added to those of the KL "
                "divergence"
            )
        super().check(values, source)

    @override
    def build(self, context: "RunContext") -> Parts:
        from odc_mpi.training.recipes.grpo.objective import GRPOObjective
        from odc_mpi.training.reference_policy import reference_policy

        rl = context.config.rl

        def objective(num_groups: int) -> GRPOObjective:
            reference = reference_policy(context) if rl.beta else None
            return GRPOObjective(context.model.module, rl, num_groups, reference)

        # The KL divergence has a gradient, also where no completion is better than the others.
        return self.build_rollouts(context, objective, trains_all=rl.beta > 0)
