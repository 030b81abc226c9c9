"""`RolloutRecipe`: what the recipes for completions of prompts have in common. They share the section `rl`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from odc_mpi.errors import UserError, warn
from odc_mpi.training.parsing.conflicts import Allowed
from odc_mpi.training.recipes.recipe import Parts, Recipe
from odc_mpi.training.recipes.rollouts.settings import RLConfig

if TYPE_CHECKING:
    from odc_mpi.models.build import MetaModel
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.inputs import Inputs
    from odc_mpi.training.recipes.rollouts.objective import RolloutObjective
    from odc_mpi.training.settings import Config

_UNKNOWN_LENGTHS = "ranks claim prompts and rollouts, whose lengths are not known in advance"
#: Settings of which these recipes support only some values.
ROLLOUT_SETTINGS: Allowed = {
    "rl.num_iterations": ((1,), "a rollout is used for one update"),
    "lora.dropout": ((0,), "with dropout the trained policy is not the one that generated"),
    "data.balance": (("lb_mini",), _UNKNOWN_LENGTHS),
    "data.cost": (("flops",), _UNKNOWN_LENGTHS),
    "data.context_parallel": (("off",), _UNKNOWN_LENGTHS),
    "islands.by": (("off",), "ranks train on completions of all others, also of those in other islands"),
}


class RolloutRecipe(Recipe):
    """Training on completions of prompts that the model generates."""

    section = "rl"
    settings = RLConfig
    data = "prompts"
    unit = "prompts"
    trains_routers = False
    claims_work = True
    best = "eval_reward", "high"
    allowed_if_exact: ClassVar = {
        "run.device": (
            ("auto", "cpu"),
            "tokens are sampled with cumulative sums, which are not deterministic on a GPU",
        ),
        "rl.skip_failed_rewards": ((False,), "the dropped completions may depend on how long their rewards take"),
        "rl.max_staleness": ((0,), "which parameters generate a token would depend on the speed of each rank"),
    }

    @override
    def samples_per_step(self, config: "Config") -> int:
        return config.data.minibatch_sequences // config.rl.num_generations

    @override
    def describe_samples(self, config: "Config") -> str:
        return f"{super().describe_samples(config)} with {config.rl.num_generations} completions each"

    @override
    def resolve_paths(self, config: "Config", resolve: Callable[..., Any]) -> "Config":
        functions = config.rl.reward_funcs and [
            resolve(spec, "rl.reward_funcs") if "/" in spec and ":" not in spec else spec
            for spec in config.rl.reward_funcs
        ]
        tokenizer = resolve(config.rl.tokenizer, "rl.tokenizer", weights=False)
        teacher = resolve(config.rl.teacher_path, "rl.teacher_path")
        return replace(config, rl=replace(config.rl, tokenizer=tokenizer, reward_funcs=functions, teacher_path=teacher))

    @override
    def check(self, values: Mapping[str, Any], source: str) -> None:
        functions, weights = values.get("rl.reward_funcs") or (), values.get("rl.reward_weights")
        if weights is not None and len(weights) != len(functions):
            raise UserError(
                f"{source}: rl.reward_weights: expected {len(functions)}, a weight for each of rl.reward_funcs, got "
                f"{len(weights)}"
            )
        if not (values.get("rl.tokenizer") or values.get("model.path")):
            raise UserError(
                f"{source}: run.objective {self.name} requires a tokenizer: set rl.tokenizer, or model.path"
            )
        num_generations = values.get("rl.num_generations", RLConfig.num_generations)
        sequences = values.get("data.minibatch_sequences", 16)
        if sequences % num_generations:
            raise UserError(
                f"{source}: data.minibatch_sequences: expected a multiple of rl.num_generations, {num_generations}, "
                f"got {sequences}: with run.objective {self.name} it is the number of completions per step"
            )

    @override
    def open_prompts(self, config: "Config", meta_model: "MetaModel", prompt_time: str | None) -> "Inputs":
        from odc_mpi.training.recipes.rollouts.prompts import open_prompts

        return open_prompts(config, meta_model, prompt_time)

    def build_rollouts(
        self, context: "RunContext", make_objective: Callable[[int], "RolloutObjective"], *, trains_all: bool
    ) -> Parts:
        """Build the minibatch source, the objective and the evaluation of a run. Collective.

        `make_objective` receives the largest number of prompt groups in a minibatch once the reward functions are
        loaded, and may be collective. `trains_all` is True if completions without an advantage are trained, too.
        """
        from odc_mpi.data.prompt_dataset import PromptDataset, warn_ignored
        from odc_mpi.rollout.rewards import RewardCaller, check_arguments, load_reward_functions
        from odc_mpi.training.recipes.rollouts.evaluation import RewardEvaluator
        from odc_mpi.training.recipes.rollouts.source import RolloutSource

        config, world, inputs, model = context.config, context.world, context.inputs, context.model
        rl = config.rl
        arguments = rl.reward_funcs or (), rl.reward_weights, model.device, inputs.prompt_time
        functions = world.run_on_all(lambda: load_reward_functions(*arguments))
        rewards_of = RewardCaller(functions, world.rank, rl.reward_timeout_s, rl.skip_failed_rewards)
        world.run_on_all(lambda: check_arguments(functions, inputs.datasets))
        names = [function.name for function in functions]
        for setting, prompts in inputs.datasets.items() if world.rank == 0 else ():
            assert isinstance(prompts, PromptDataset)
            warn_ignored(setting, prompts.ignored, len(prompts))
        limits = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        changed = [f"rl.{name} {getattr(rl, name):g}" for name, off in limits.items() if getattr(rl, name) != off]
        if world.rank == 0 and changed:
            warn(
                f"WARNING: {' and '.join(changed)}: completions are sampled from another distribution than the "
                "policy's, so training is not strictly on-policy"
            )
        model.eval()  # with dropout, the trained policy would differ from the one that generates
        objective = make_objective(config.data.minibatch_sequences // rl.num_generations)
        source = RolloutSource(context, names, rewards_of, trains_all=trains_all)
        if not isinstance(held_out := inputs.evaluation, PromptDataset):
            return Parts(objective, source=source)
        return Parts(objective, [RewardEvaluator(context, held_out, rewards_of)], source)
