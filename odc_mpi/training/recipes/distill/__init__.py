"""On-policy distillation: completions of the model are scored token by token by a larger model, the teacher."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.recipes.rollouts.recipe import ROLLOUT_SETTINGS, RolloutRecipe

if TYPE_CHECKING:
    from odc_mpi.models.build import MetaModel
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.settings import Config

_NOT_TRAINED = "the teacher is what is learned from; rewards are only reported"


class Distill(RolloutRecipe):
    """Training on the model's own completions, with the log-probabilities of a teacher as the rewards of tokens."""

    name = "distill"
    allowed: ClassVar = {
        **ROLLOUT_SETTINGS,
        "rl.beta": ((0,), "the teacher takes the place of the reference model"),
        "rl.scale_rewards": (("group",), _NOT_TRAINED),
    }

    @override
    def check(self, values: Mapping[str, Any], source: str) -> None:
        if not values.get("rl.teacher_path"):
            raise UserError(
                f"{source}: run.objective distill requires rl.teacher_path: set it to the model to learn from"
            )
        if values.get("run.keep_best") and not values.get("rl.reward_funcs"):
            raise UserError(
                f"{source}: run.keep_best requires rl.reward_funcs, whose rewards choose the checkpoint: set it, for "
                "example to exact_match"
            )
        super().check(values, source)

    @override
    def teacher(self, config: "Config") -> "MetaModel":
        from odc_mpi.training.recipes.distill.objective import build_teacher

        return build_teacher(config)

    @override
    def build(self, context: "RunContext") -> Parts:
        from odc_mpi.training.recipes.distill.objective import DistillObjective, teacher_policy

        def objective(num_groups: int) -> DistillObjective:
            return DistillObjective(context.model.module, context.config.rl, num_groups, teacher_policy(context))

        return self.build_rollouts(context, objective, trains_all=True)
