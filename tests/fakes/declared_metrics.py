"""Metrics that the callbacks of a run declare, by objective."""

from odc_mpi.observe.log import RunLogger
from odc_mpi.observe.timing import StepTimes
from odc_mpi.observe.usage import UsageMetrics
from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.rollouts.evaluation import RewardEvaluator
from odc_mpi.training.recipes.rollouts.source import RolloutSource
from odc_mpi.training.recipes.sft.objective import LossEvaluator, SFTObjective
from odc_mpi.training.source import DatasetSource
from odc_mpi.training.start.run_info import RunInfo
from odc_mpi.training.update import Update


def _declared(*callbacks):
    return [metric for callback in (RunLogger, *callbacks) for metric in callback.metrics]


#: Without an evaluation, as a line of `step_metrics`.
PLAIN = _declared(SFTObjective, Update, DatasetSource, StepTimes, UsageMetrics, RunInfo)
SFT = [*PLAIN, *LossEvaluator.metrics]
GRPO = _declared(GRPOObjective, Update, RolloutSource, StepTimes, RewardEvaluator, UsageMetrics, RunInfo)
