"""The parts of GRPO's loss, by their formulas, and sums that do not depend on the ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed_models import packed_model
from pair_files import random_groups
from tiny_configurations import tiny_config
from transformers import AutoModelForCausalLM

from odc_mpi.data.groups import group_microbatches
from odc_mpi.models import attention
from odc_mpi.models.token_logps import TokenLogps
from odc_mpi.rollout.rewards import GroupRewards
from odc_mpi.rollout.sampling import PromptCompletions
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.recipes.grpo.objective import GRPOObjective, kl_k3
from odc_mpi.training.recipes.rollouts.metrics import RolloutMetrics
from odc_mpi.training.recipes.rollouts.objective import loss_normalizer
from odc_mpi.training.recipes.rollouts.settings import RLConfig


@pytest.mark.parametrize("offset", [0.0, 1e-4, -1e-3, 0.3, -2.0, 5.0])
def test_the_divergence_is_the_formula_also_where_policies_are_alike(offset):
    reference = torch.tensor([-2.5])
    logps = reference - offset
    difference = (reference - logps).double()
    assert kl_k3(logps, reference).item() == pytest.approx((difference.exp() - difference - 1).item(), rel=1e-3)


def test_divisors():
    sections = [RLConfig(loss_type=name, max_completion_length=10) for name in ("dapo", "grpo", "dr_grpo")]
    assert [loss_normalizer(rl, num_tokens=30.0, num_completions=4.0) for rl in sections] == [30.0, 4.0, 40.0]
    assert loss_normalizer(sections[0], num_tokens=0.0, num_completions=4.0) == 1.0


#: Counts of the source that the objective reads.
COUNTS = ("loss_tokens", "trained_tokens", "completions")
#: Numbers whose sum depends on the order.
VALUES = (np.random.default_rng(0).normal(size=12) * 10.0 ** np.arange(-6, 6)).tolist()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_metrics_do_not_depend_on_who_generated_a_group(num_ranks):
    def computed(num_ranks):
        ranks, rows = [RolloutMetrics(["one"], len(VALUES)) for _ in range(num_ranks)], []
        for position, value in enumerate(VALUES):
            completions = PromptCompletions([[1]], [np.zeros(1, np.float32)], [True], value, [np.ones(1, np.int64)])
            rewards = GroupRewards(np.array([[value]]), np.ones(1), 0)
            ranks[position % num_ranks].add_group(1, position, completions, rewards, np.zeros(1, np.bool_))
        gathered = MinibatchStats(ranks[0].gathered_names)
        for rank in ranks:
            gathered.local.update(rank.values)
            rows.append(gathered.report(np.zeros(0), [True]))
        gathered.receive_reports(np.stack(rows))
        return {name: value for name, value in ranks[0].compute(gathered).items() if not name.startswith("groups_")}

    assert computed(num_ranks) == computed(1)
    assert computed(1)["reward"] == pytest.approx(np.mean(VALUES)) == computed(1)["rewards/one/mean"]


def test_sums_do_not_depend_on_the_order_of_microbatches():
    objective, sums = GRPOObjective(packed_model(), RLConfig(), 1), []
    for order in (VALUES, VALUES[::-1]):
        objective.on_step_begin(None)
        for value in order:
            objective.on_microbatch_end(SimpleNamespace(loss=-value, statistics=(value,) * 2))
        sums.append(objective.local_values())
    assert sums[0] == sums[1] == (pytest.approx(-sum(VALUES)), pytest.approx(sum(VALUES)), max(VALUES))
    assert sum(VALUES) != sum(VALUES[::-1])


def losses_and_gradient(model, reference, rl, microbatches):
    """The sum of the losses of microbatches, and its gradients."""

    def reference_scores(*arguments):
        with torch.no_grad():
            return TokenLogps(reference)(*arguments)

    model.zero_grad()
    objective, total = GRPOObjective(model, rl, 1, reference_scores if rl.beta else None), 0.0
    for microbatch in microbatches:
        loss = objective.loss(None, microbatch)
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("kind", "beta"), [("llama", 0.1), ("qwen3", 0.0), ("mistral", 0.0), ("gpt_oss", 0.1)])
def test_a_shared_prompt_changes_no_loss_and_no_gradient(kind, beta):
    """Compared with one completion per microbatch. The window of Mistral and GPT-OSS has 8 tokens."""
    attention.register()
    config = tiny_config(kind)
    config.use_cache = False
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        packed = attention.IMPLEMENTATIONS["sdpa"]
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=packed).eval())
    rl = RLConfig(loss_type="grpo", beta=beta)
    groups = random_groups([(20, 5, 3, 9, 5, 6), (4, 7, 12, 1), (9, 2), (1, 1, 3), (6, 8, 5, 8)], vocab_size=512)
    alone, wanted = losses_and_gradient(*models, rl, group_microbatches(groups, 1000, packs=False))
    for max_tokens in (1000, 40):  # the first group is split in two
        loss, gradient = losses_and_gradient(*models, rl, group_microbatches(groups, max_tokens))
        assert loss == pytest.approx(alone, abs=1e-6)
        difference = torch.cat([(gradient[name] - wanted[name]).flatten() for name in wanted])
        assert difference.norm() <= 1e-6 * torch.cat([value.flatten() for value in wanted.values()]).norm()


def test_weights_of_old_tokens_reach_the_loss_and_the_metrics():
    torch.manual_seed(0)
    model, groups = packed_model().eval(), random_groups([(4, 7, 12, 1), (9, 2)], vocab_size=16)
    [microbatch] = group_microbatches(groups, 1000)
    statistics, losses = {}, {}
    for mode in ("clip", "none"):
        objective = GRPOObjective(model, RLConfig(max_staleness=1, importance_sampling_mode=mode), 1)
        losses[mode] = objective.loss(None, microbatch).item()
        step, gathered = SimpleNamespace(metrics={}), MinibatchStats([*objective.gathered_names, *COUNTS])
        objective.on_step_begin(step)
        objective.on_microbatch_end(SimpleNamespace(loss=losses[mode], statistics=objective.statistics.tolist()))
        values = zip(objective.gathered_names, objective.local_values(), strict=True)
        gathered.local |= dict(values) | dict.fromkeys(COUNTS, float(microbatch.num_tokens))
        gathered.receive_reports(gathered.report(np.zeros(0), [True])[None])
        objective.on_gathered(step, gathered)
        statistics[mode] = step.metrics
    on_policy = GRPOObjective(model, RLConfig(), 1).loss(None, microbatch).item()
    assert losses["none"] == on_policy != losses["clip"]
    logps = TokenLogps(model)(microbatch.inputs, microbatch.logit_positions, microbatch.targets).logps
    ratios, found = (logps - microbatch.columns["logps"]).exp(), statistics["clip"]
    names = [f"sampling/importance_sampling_ratio/{name}" for name in ("min", "max")]
    assert [found[name] for name in names] == pytest.approx([ratios.min().item(), ratios.max().item()])
    mean = found["sampling/importance_sampling_ratio/mean"] * microbatch.num_tokens
    assert mean == pytest.approx(ratios.sum().item(), rel=1e-5)
    low, high, region = (found[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region"))
    assert low > 0 and high >= 0 and region == low + high and statistics["none"]["clip_ratio/region_mean"] == 0
