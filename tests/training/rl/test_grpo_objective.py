"""The parts of GRPO's loss, by their formulas, and sums that do not depend on the ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from packed_models import packed_model

from odc_mpi.rollout.rewards import GroupRewards
from odc_mpi.rollout.sample import PromptCompletions
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.training.objectives.grpo import GRPOObjective, kl_k3, loss_normalizer
from odc_mpi.training.recipes.grpo import GRPOConfig
from odc_mpi.training.rl.metrics import RolloutMetrics


@pytest.mark.parametrize("offset", [0.0, 1e-4, -1e-3, 0.3, -2.0, 5.0])
def test_the_divergence_is_the_formula_also_where_policies_are_alike(offset):
    reference = torch.tensor([-2.5])
    logps = reference - offset
    difference = (reference - logps).double()
    assert kl_k3(logps, reference).item() == pytest.approx((difference.exp() - difference - 1).item(), rel=1e-3)


def test_divisors():
    sections = [GRPOConfig(loss_type=name, max_completion_length=10) for name in ("dapo", "grpo", "dr_grpo")]
    assert [loss_normalizer(rl, num_tokens=30.0, num_completions=4.0) for rl in sections] == [30.0, 4.0, 40.0]
    assert loss_normalizer(sections[0], num_tokens=0.0, num_completions=4.0) == 1.0


#: Numbers whose sum depends on the order.
VALUES = (np.random.default_rng(0).normal(size=12) * 10.0 ** np.arange(-6, 6)).tolist()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_metrics_do_not_depend_on_who_generated_a_group(num_ranks):
    def computed(num_ranks):
        ranks, rows = [RolloutMetrics(["one"], len(VALUES)) for _ in range(num_ranks)], []
        for position, value in enumerate(VALUES):
            completions = PromptCompletions([[1]], [np.zeros(1, np.float32)], [True], value)
            rewards = GroupRewards(np.array([[value]]), np.ones(1), 0)
            ranks[position % num_ranks].add_group(position, completions, rewards, np.zeros(1, np.bool_))
        gathered = MinibatchStats(ranks[0].gathered_names)
        for rank in ranks:
            gathered.local.update(rank.values)
            rows.append(gathered.report(np.zeros(0), [True]))
        gathered.receive_reports(np.stack(rows))
        return {name: value for name, value in ranks[0].compute(gathered).items() if not name.startswith("groups_")}

    assert computed(num_ranks) == computed(1)
    assert computed(1)["reward"] == pytest.approx(np.mean(VALUES)) == computed(1)["rewards/one/mean"]


def test_sums_do_not_depend_on_the_order_of_microbatches():
    objective, sums = GRPOObjective(packed_model(), GRPOConfig(), 1), []
    for order in (VALUES, VALUES[::-1]):
        objective.on_step_begin(None)
        for value in order:
            objective.on_microbatch_end(SimpleNamespace(loss=-value, statistics=(value,) * 2))
        sums.append(objective.local_values())
    assert sums[0] == sums[1] == (pytest.approx(-sum(VALUES)), pytest.approx(sum(VALUES)), max(VALUES))
    assert sum(VALUES) != sum(VALUES[::-1])
