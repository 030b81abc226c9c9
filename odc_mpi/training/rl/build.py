"""Construction of the source, objective and callbacks of GRPO."""

from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.errors import warn
from odc_mpi.observe.callback import Callback
from odc_mpi.probe.decision import Decision
from odc_mpi.rollout.rewards import load_reward_functions
from odc_mpi.runtime.world import World
from odc_mpi.shard.model import ShardedModel
from odc_mpi.training.inputs import Inputs
from odc_mpi.training.objectives.grpo import GRPOObjective
from odc_mpi.training.rl.evaluation import RewardEvaluator
from odc_mpi.training.rl.prompts import PromptLoader
from odc_mpi.training.rl.reference import make_reference_logps
from odc_mpi.training.rl.source import RolloutSource
from odc_mpi.training.settings import Config


def build_grpo(
    config: Config, world: World, model: ShardedModel, inputs: Inputs, decision: Decision
) -> tuple[RolloutSource, GRPOObjective, list[Callback]]:
    """Build source, objective and further callbacks. Collective.

    Switches dropout in the model off, so that the policy that generates is the one that is trained.
    """
    rl = config.rl
    assert isinstance(inputs.loader, PromptLoader) and isinstance(inputs.dataset, PromptDataset) and rl.reward_funcs
    specs = rl.reward_funcs
    reward_functions = world.run_on_all(lambda: load_reward_functions(specs, rl.reward_weights))
    if world.rank == 0 and (rl.top_p < 1 or rl.top_k):
        warn(
            f"WARNING: rl.top_p {rl.top_p:g} and rl.top_k {rl.top_k}: completions are sampled from a truncated "
            "distribution, so training is not strictly on-policy"
        )
    model.eval()
    reference_logps = make_reference_logps(config, world, model, decision) if rl.beta else None
    source = RolloutSource(config, world, model, inputs.dataset, inputs.loader, reward_functions)
    callbacks: list[Callback] = []
    if isinstance(inputs.evaluation, PromptDataset):
        callbacks.append(RewardEvaluator(config, world, model, inputs.evaluation, reward_functions))
    return source, GRPOObjective(rl, config.data.minibatch_sequences // rl.num_generations, reference_logps), callbacks
