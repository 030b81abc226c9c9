"""The parts of a run that learns from rewards, put together. Collective."""

from pathlib import Path

from odc_mpi.data.prompts import Prompts
from odc_mpi.errors import warn
from odc_mpi.observe.participant import Participant
from odc_mpi.rollout.rewards import find_rewards
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.stack.decision import Decision
from odc_mpi.train.inputs import Inputs
from odc_mpi.train.objectives.grpo import Grpo
from odc_mpi.train.rl.completions import ShownCompletions
from odc_mpi.train.rl.evaluation import RewardEvaluation
from odc_mpi.train.rl.prompts import PromptLoader
from odc_mpi.train.rl.reference import reference_policy
from odc_mpi.train.rl.source import RolloutSource
from odc_mpi.train.settings import Config


def learn_from_rewards(
    config: Config, world: World, model: ShardedModel, inputs: Inputs, decision: Decision
) -> tuple[RolloutSource, Grpo, list[Participant]]:
    """Put source, objective and further participants together. Collective.

    Args:
        config: Of the run.
        world: The ranks.
        model: Before its first minibatch; dropout is off from now on, so that what generates is what is trained.
        inputs: With prompts.
        decision: How ranks reach each other.

    Raises:
        AgreedError: A reward function is not there, or its module fails.
    """
    rl = config.rl
    assert isinstance(inputs.loader, PromptLoader) and isinstance(inputs.dataset, Prompts) and rl.reward_funcs
    places = rl.reward_funcs
    rewards = world.agree(lambda: find_rewards(places, rl.reward_weights))
    if world.rank == 0 and (rl.top_p < 1 or rl.top_k):
        warn(
            f"WARNING: rl.top_p {rl.top_p:g} and rl.top_k {rl.top_k}: completions are drawn from other distributions "
            "than the policy's own, which is trained: not strictly on-policy"
        )
    model.eval()
    reference = reference_policy(config, world, model, decision) if rl.beta else None
    source = RolloutSource(config, world, model, inputs.dataset, inputs.loader, rewards)
    more: list[Participant] = []
    if isinstance(inputs.evaluation, Prompts):
        more.append(RewardEvaluation(config, world, model, inputs.evaluation, rewards))
    if rl.log_completions:
        more.append(ShownCompletions(world, source, Path(config.run.dir), rl.log_completions))
    return source, Grpo(rl, config.data.minibatch_sequences // rl.num_generations, reference), more
