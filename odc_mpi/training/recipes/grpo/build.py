"""Building the parts of a GRPO run: minibatch source, objective and evaluation."""

from odc_mpi.data.prompt_dataset import PromptDataset, warn_ignored
from odc_mpi.errors import warn
from odc_mpi.observe.callback import Callback
from odc_mpi.rollout.rewards import RewardScorer, check_arguments, load_reward_functions
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.context import RunContext
from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.recipe import Parts
from odc_mpi.training.recipes.rollouts.evaluation import RewardEvaluator
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.reference_policy import reference_policy


def build_grpo(context: RunContext, model: ShardedModel) -> Parts:
    """Build the minibatch source, the objective and the other callbacks for a GRPO run. Collective."""
    config, world, inputs = context.config, context.world, context.inputs
    rl = config.rl
    assert rl.reward_funcs, "required by the recipe"
    arguments = rl.reward_funcs, rl.reward_weights, model.device, inputs.prompt_time
    functions = world.run_on_all(lambda: load_reward_functions(*arguments))
    rewards_of = RewardScorer(functions, world.rank, rl.reward_timeout_s, rl.skip_failed_rewards)
    world.run_on_all(lambda: check_arguments(functions, inputs.datasets))
    names = [function.name for function in functions]
    for setting, prompts in inputs.datasets.items() if world.rank == 0 else ():
        assert isinstance(prompts, PromptDataset)
        warn_ignored(setting, prompts.ignored, len(prompts))
    if world.rank == 0 and (rl.top_p < 1 or rl.top_k):
        warn(
            f"WARNING: rl.top_p {rl.top_p:g} and rl.top_k {rl.top_k}: completions are sampled from a truncated "
            "distribution, so training is not strictly on-policy"
        )
    model.eval()  # with dropout, the trained policy would differ from the one that generates
    reference = reference_policy(context, model) if rl.beta else None
    source = RolloutSource(context, model, names, rewards_of)
    callbacks: list[Callback] = []
    if isinstance(inputs.evaluation, PromptDataset):
        callbacks.append(RewardEvaluator(context, model, inputs.evaluation, rewards_of))
    num_groups = config.data.minibatch_sequences // rl.num_generations
    return Parts(GRPOObjective(model.module, rl, num_groups, reference), callbacks, source)
