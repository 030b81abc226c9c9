"""Evaluation of a GRPO run: rewards for greedily decoded completions of held-out prompts."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from odc_mpi.comm.tickets import Tickets
from odc_mpi.data.prompt_dataset import PromptDataset
from odc_mpi.models.decoding import unsharded_if_fits
from odc_mpi.models.quirks.caches import decodes_batches
from odc_mpi.observe.metrics import RESULT, Metric
from odc_mpi.rollout.builtin_rewards import exact_match
from odc_mpi.rollout.decode import sample
from odc_mpi.rollout.rewards import RewardCaller
from odc_mpi.rollout.sampling import PromptCompletions, RolloutSamplingParams
from odc_mpi.training.context import RunContext
from odc_mpi.training.evaluation import PeriodicEvaluator
from odc_mpi.training.recipes.rollouts.prompts import PromptCodec, longest_first_batches

#: Number of ranks that an exact run assumes for its batch sizes so that they do not depend on the actual number.
_EXACT_SHARES = 16


class RewardEvaluator(PeriodicEvaluator):
    """Computes rewards on held-out prompts. Ranks claim batches of prompts to decode. Construction is collective."""

    metrics = (
        Metric(
            "eval_reward",
            "held-out reward",
            RESULT,
            "start final best",
            "{:.4f}",
            ("eval", 8),
            "eval reward",
            "watch",
            "high",
        ),
        Metric("eval_exact_match", "held-out exact match", RESULT, "start final", "{:.1%}", None, "eval match", "tile"),
        Metric("eval_mean_length", "mean length of completions of held-out prompts", RESULT),
        *PeriodicEvaluator.metrics,
    )

    def __init__(self, context: RunContext, prompts: PromptDataset, rewards_of: RewardCaller) -> None:
        config, world, model = context.config, context.world, context.model
        super().__init__(config.run, model)
        self._rl, self._world = config.rl, world
        self._prompts, self._rewards_of = prompts, rewards_of
        self._codec, self._tickets = PromptCodec(prompts, config.model.path), Tickets(world)
        count = min(config.data.eval_sequences or len(prompts), len(prompts))
        shares = _EXACT_SHARES if config.run.exact else world.size
        lengths = prompts.lengths[:count].tolist()
        max_prompts = config.rl.max_concurrent_sequences if decodes_batches(model.module) else 1
        self._decode_batches = longest_first_batches(lengths, shares, max_prompts)
        self._note: Callable[[str], None] = world.set_status

    def evaluate(self) -> dict[str, Any]:
        """Return the mean reward, exact match and length. A mean is None if no completion has a value. Collective."""
        sampling = RolloutSamplingParams(1, self._rl.max_completion_length, temperature=0.0)
        results: list[tuple[int, float, float, int]] = []
        with self._model.activity("evaluating") as self._note, unsharded_if_fits(self._model):
            for ticket in self._tickets.draw(len(self._decode_batches)):
                indices = self._decode_batches[ticket]
                prompts = [self._codec.encode(index, self._prompts[index]) for index in indices]

                def on_prompt_done(i: int, completions: PromptCompletions, indices: list[int] = indices) -> None:
                    results.append(self._evaluate_completion(indices[i], completions))

                sample(self._model.module, prompts, sampling, on_prompt_done, on_token=self._report_token)
        # In the order of the prompts, so that sums do not depend on which rank generated what.
        _, *columns = np.array(sorted(itertools.chain.from_iterable(self._world.gather_objects(results)))).T
        self._tickets.reset()  # all ranks are done, and claim again only after the next parameters are published
        return dict(zip(("eval_reward", "eval_exact_match", "eval_mean_length"), map(_mean, columns), strict=True))

    def _report_token(self, token: int) -> None:
        self._note(f"evaluating, token {token:,} of {self._rl.max_completion_length:,}")

    def _evaluate_completion(self, index: int, completions: PromptCompletions) -> tuple[int, float, float, int]:
        """Return the prompt index, reward, exact match (NaN if the prompt has no answer) and length of a completion."""
        record = self._prompts[index]
        reward_kwargs = self._codec.reward_kwargs(record, completions.tokens)
        self._note(f"computing rewards of prompt {index}")
        [reward], [match] = self._rewards_of(reward_kwargs, index).rewards, exact_match(**reward_kwargs)
        return index, float(reward), np.nan if match is None else match, len(completions.tokens[0])


def _mean(values: np.ndarray) -> float | None:
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if len(valid) else None
