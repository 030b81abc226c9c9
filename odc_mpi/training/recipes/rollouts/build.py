"""Building the parts of a run that trains on completions: minibatch source, objective and evaluation."""

from collections.abc import Callable

from odc_mpi.data.prompt_dataset import PromptDataset, warn_ignored
from odc_mpi.errors import warn
from odc_mpi.observe.callback import Callback
from odc_mpi.rollout.rewards import RewardCaller, check_arguments, load_reward_functions
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.recipes.rollouts.evaluation import RewardEvaluator
from odc_mpi.training.recipes.rollouts.objective import RolloutObjective
from odc_mpi.training.recipes.rollouts.source import RolloutSource


def build_rollouts(
    context: RunContext, model: ShardedModel, make_objective: Callable[[int], RolloutObjective], *, trains_all: bool
) -> Parts:
    """Build the minibatch source, the objective and the other callbacks of a run. Collective.

    `make_objective` receives the largest number of prompt groups in a minibatch once the reward functions are loaded,
    and may be collective. `trains_all` is True if completions without an advantage are trained, too.
    """
    config, world, inputs = context.config, context.world, context.inputs
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
            f"WARNING: {' and '.join(changed)}: completions are sampled from another distribution than the policy's, "
            "so training is not strictly on-policy"
        )
    model.eval()  # with dropout, the trained policy would differ from the one that generates
    objective = make_objective(config.data.minibatch_sequences // rl.num_generations)
    source = RolloutSource(context, model, names, rewards_of, trains_all=trains_all)
    callbacks: list[Callback] = []
    if isinstance(inputs.evaluation, PromptDataset):
        callbacks.append(RewardEvaluator(context, model, inputs.evaluation, rewards_of))
    return Parts(objective, callbacks, source)
