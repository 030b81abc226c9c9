"""The estimate of the KL divergence between the policy and the reference model in KTO.

The estimate is the mean log-ratio, at least 0, of *mismatched* answers: each prompt of the minibatch with the answer to
the previous prompt of the minibatch, as in TRL. It is part of the loss of every answer, so all ranks need it before
their first backward pass: K in docs/ordering.md.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.groups import pack_groups
from odc_mpi.data.loader import PlannedMinibatch
from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.plan.balance import find_strategy
from odc_mpi.data.prompt_group import PromptGroup, read_group
from odc_mpi.observe.callback import round_for_exact_sum
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import initial_cost_model

#: Bound for `round_for_exact_sum` of the log-ratio of an answer.
_MAX_LOG_RATIO = 2.0**16


class KLEstimator:
    """Estimates the KL divergence for minibatches. Construction is collective.

    The argument `log_ratios` is a one-sided function that returns the log-ratio of each answer in a microbatch of n
    prompts with one answer each, float64 `[n]`. It is called without gradients.
    """

    def __init__(self, context: RunContext, log_ratios: Callable[[Microbatch], torch.Tensor]) -> None:
        config = context.config
        self._model, self._log_ratios = context.model, log_ratios
        self._rank, self._size = context.world.rank, context.world.size
        self._max_tokens = config.data.max_tokens_per_microbatch
        positions = getattr(context.inputs.model.module.config, "max_position_embeddings", None)
        self._max_length = min(self._max_tokens, positions or self._max_tokens)
        self._cost_model = initial_cost_model(config.data, context.inputs.model)
        packs = context.inputs.model.packing.packs
        self._strategy = find_strategy("dynamic", self._cost_model, exact=config.run.exact, packs=packs)
        self._tickets = Tickets(context.world)
        self._mismatched = context.prefix.without_storing if context.prefix else nullcontext

    def estimate(self, minibatch: PlannedMinibatch) -> float:
        """Return the estimate for a minibatch, which is equal on all ranks. Collective.

        Ranks claim microbatches of mismatched answers, and then gather the sum and the number of the log-ratios.
        """
        groups = _Mismatched(minibatch, self._max_length)
        plan = self._strategy(groups.lengths, self._size, self._max_tokens, self._cost_model)
        total, count = 0.0, 0
        with torch.no_grad(), self._model.activity("estimating the KL divergence"), self._mismatched():
            claimed = (plan.pool[ticket] for ticket in (self._tickets.draw(len(plan.pool)) if plan.pool else ()))
            for positions in itertools.chain(filter(None, plan.microbatches[self._rank]), claimed):
                microbatch = pack_groups([groups.read(position) for position in positions])
                for ratio in self._log_ratios(microbatch.to(self._model.device)).tolist():
                    total, count = total + round_for_exact_sum(ratio, _MAX_LOG_RATIO), count + 1
        total, count = self._model.gather_values([total, count]).sum(axis=0)
        self._tickets.reset()  # all ranks are done, and claim again only after they have synchronized again
        return max(0.0, total / count)


class _Mismatched:
    """The prompts of a minibatch, each with the answer to the previous prompt, the first one with that to the last one.

    If the last minibatch of a data epoch has only one prompt, its answer is that to another prompt of the data set.
    An answer is truncated if it has more than `max_length` tokens with its prompt. `lengths` contains these numbers of
    tokens, int64 `[n]`.
    """

    def __init__(self, minibatch: PlannedMinibatch, max_length: int) -> None:
        self._dataset, self._prompts = minibatch.dataset, minibatch.indices
        lengths, num_prompts = self._dataset.lengths, self._dataset.columns["num_prompt_tokens"]
        is_alone = len(self._prompts) == 1
        self._answers = (self._prompts + 1) % len(lengths) if is_alone else np.roll(self._prompts, 1)
        num_answer_tokens = (lengths - num_prompts)[self._answers]
        self._max_length = max_length
        sums = num_prompts[self._prompts] + num_answer_tokens
        self.lengths: npt.NDArray[np.int64] = np.minimum(sums, self._max_length)

    def read(self, position: int) -> PromptGroup:
        """Read the group at a position in the minibatch."""
        group = read_group(self._dataset, int(self._prompts[position]))
        [answer] = read_group(self._dataset, int(self._answers[position])).answers
        kept = slice(self._max_length - len(group.prompt))
        answer = answer._replace(tokens=answer.tokens[kept], loss_mask=answer.loss_mask[kept])
        return PromptGroup(group.index, group.prompt, [answer])
