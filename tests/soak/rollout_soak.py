"""Many minibatches of rollouts without a model: every completion is trained exactly once, as it was generated.

    mpiexec -n RANKS python tests/soak/rollout_soak.py --steps 20000

Tickets, the exchange, rewards and microbatches are those of training; what generates is given completions with sleeps
in between, and what trains looks at its microbatches. In each step a rank drawn for it is slow at generating, another
one slow at training, another one late; all sleep at random. Stores have space for nothing, for about one or two prompt
groups, or for all. The content of each completion says which one it is, and follows from seed, step and prompt.
"""

import argparse
import functools
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("mpi", "fakes")]
from grpo_job import MAX_LENGTH, NUM_GENERATIONS, NUM_PROMPTS, make_settings, read_prompt_tokens, write_files

from odc_mpi.observe.callback import Step
from odc_mpi.rollout.rewards import RewardFunction
from odc_mpi.rollout.sample import PromptCompletions
from odc_mpi.runtime.world import World
from odc_mpi.shard.minibatch_stats import MinibatchStats
from odc_mpi.shard.step_phases import SpanRecorder
from odc_mpi.training.rl.prompts import PromptLoader
from odc_mpi.training.rl.source import RolloutSource

#: Bytes of a store for nothing, for about one prompt group, for about two, and for all of a step.
STORES = (0, 700, 1400, 1 << 20)
PROMPTS_PER_STEP = 6
#: The most that a rank comes late, and that it sleeps at a time.
LATE_S, SLEEP_S = 2e-3, 5e-4


@functools.lru_cache(maxsize=NUM_PROMPTS)
def completion_tokens(seed, step, prompt):
    """Return the completions of a prompt: their first tokens identify them."""
    draws = np.random.default_rng((seed, step, prompt))
    lengths = draws.integers(4, MAX_LENGTH + 1, size=NUM_GENERATIONS)
    heads = ([prompt, completion, step % 60] for completion in range(NUM_GENERATIONS))
    return [head + draws.integers(0, 60, size=length - 3).tolist() for head, length in zip(heads, lengths, strict=True)]


def reward(completion_ids, **columns):
    """Reward one completion of a prompt or none; in one of four cases all are equal."""
    return [float(tokens[3] % NUM_GENERATIONS == 0) for tokens in completion_ids]


class _NoModel:
    """The attributes of a model that `RolloutSource` reads."""

    module = None
    cache_needs = SimpleNamespace(maximum=SimpleNamespace(parameters=0))
    cache_bytes = SimpleNamespace(parameters=0)
    spans = SpanRecorder()

    @contextmanager
    def activity(self, what):
        yield lambda told: None

    def unsharded(self, **how):
        return nullcontext()


class Rollouts:
    """Rollouts of a directory of prompts, step by step.

    Args:
        world: The ranks.
        path: Written by `grpo_job.write_files`.
        seed: Seed, combined with the step.
        store_bytes: Bytes of the store of each rank.
        beta: Above 0, completions without an advantage are trained, too.

    Attributes:
        num_claimed_from_others: Groups that a rank trained but did not generate, over all steps.
        num_not_stored: Groups that found no room in a store, over all steps.
        num_checked: Completions that were trained, over all steps and ranks.
    """

    def __init__(self, world, path, seed, store_bytes, beta):
        changes = {
            "rl__store_bytes": store_bytes,
            "rl__beta": beta,
            "rl__max_concurrent_sequences": 2 * NUM_GENERATIONS,
        }
        config = make_settings(path, **changes)
        self._world, self._seed, self._beta = world, seed, beta
        prompts = read_prompt_tokens(path)
        loader = PromptLoader(prompts, PROMPTS_PER_STEP, seed, world.rank)
        rewards = [RewardFunction("reward", "reward", reward, 1.0)]
        self._source = RolloutSource(config, world, _NoModel(), prompts, loader, rewards, engine=self._generate)
        self._whims = np.random.default_rng((seed, world.rank))
        self._step = self.num_claimed_from_others = self.num_not_stored = self.num_checked = 0

    def step(self):
        """Train on a minibatch, and check it. Collective."""
        self._step += 1
        draws = np.random.default_rng((self._seed, self._step))  # the same on every rank
        self._slow, self._slow_trainer, late = draws.integers(-1, 2 * self._world.size, size=3).tolist()
        source, minibatch = self._source, self._source.next_minibatch()
        step = Step(self._step, minibatch, {})
        gathered = MinibatchStats(source.gathered_names)
        source.on_step_begin(step)
        if self._world.rank == late:
            time.sleep(self._whims.random() * LATE_S)
        trained = np.zeros((NUM_PROMPTS, NUM_GENERATIONS))
        for batch in source.microbatches(minibatch):
            for prompt, completion in self._recognized(batch):
                trained[prompt, completion] += 1
            self._sleep(slow=self._world.rank == self._slow_trainer)
        gathered.local.update(zip(source.gathered_names, source.local_values(), strict=True))
        report = gathered.report(trained.ravel(), [False])
        gathered.receive_reports(np.array(self._world.gather_objects(report)))  # gradients complete
        self._check(minibatch.indices.tolist(), gathered.sums.reshape(trained.shape), step, gathered)
        self._world.wait_collective(self._world.comm.Ibarrier(), "synchronizing at parameters_published of a soak")

    def close(self):
        """Free windows. Collective."""
        self._world.gather_objects(None)
        self._source._queue.close()
        self._source._tickets.close()
        self._source.close()

    def _sleep(self, *, slow):
        chance = self._whims.random()
        if slow or chance < 0.05:
            time.sleep(self._whims.random() * SLEEP_S)

    def _generate(self, module, prompts, sampling, deliver, progress):
        for i in self._whims.permutation(len(prompts)).tolist():
            self._sleep(slow=self._world.rank == self._slow)
            progress(1)
            tokens = completion_tokens(self._seed, self._step, prompts[i].number)
            logps = [-np.arange(len(own), dtype=np.float32) for own in tokens]
            deliver(i, PromptCompletions(tokens, logps, [True] * len(tokens), 0.0))

    def _recognized(self, batch):
        """Yield prompt and number of each completion of a microbatch, which is as it was generated."""
        for sequence, advantage in enumerate(batch.advantages.tolist()):
            own = batch.sequence == sequence
            tokens = batch.targets[own].tolist()
            prompt, completion = tokens[:2]
            generated = completion_tokens(self._seed, self._step, prompt)
            rewards = np.array(reward(generated))
            assert tokens == generated[completion], f"step {self._step}: {tokens} of prompt {prompt}"
            assert batch.logps[own].tolist() == [-float(i) for i in range(len(tokens))]
            assert np.sign(advantage) == np.sign(rewards[completion] - rewards.mean())
            yield prompt, completion

    def _check(self, indices, trained, step, gathered):
        wanted = np.zeros_like(trained)
        for prompt in indices:
            rewards = reward(completion_tokens(self._seed, self._step, prompt))
            wanted[prompt] = 1 if self._beta or len(set(rewards)) > 1 else 0
        assert np.array_equal(trained, wanted), f"step {self._step}:\n{trained}\nwanted\n{wanted}"
        self._source.on_gathered(step, gathered)
        assert gathered.sum("groups_generated") == len(indices)
        self.num_checked += int(trained.sum())
        self.num_claimed_from_others += step.metrics["groups_claimed_from_other_ranks"]
        self.num_not_stored += step.metrics["groups_not_stored"]


def soak(world, path, num_steps, seed, store_bytes):
    """Run steps, half of them with beta; return the two `RolloutScenario`. Collective.

    Raises:
        AssertionError: A completion was not trained exactly once, or not as it was generated.
    """
    found = []
    for beta in (0.0, 0.1):
        rollouts = Rollouts(world, path, seed, store_bytes, beta)
        for _ in range(num_steps // 2):
            rollouts.step()
        rollouts.close()
        found.append(rollouts)
    return found


def main():
    parser = argparse.ArgumentParser(description="Check that many rollouts are each trained once.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, World(timeout_s=120) as world:
        path = Path(world.gather_objects(folder)[0]) / "grpo"
        if world.rank == 0:
            write_files(path)
        world.gather_objects(None)
        for store_bytes in STORES:
            began = time.perf_counter()
            found = soak(world, path, arguments.steps // len(STORES), arguments.seed, store_bytes)
            if world.rank == 0:
                checked, others, kept = (
                    sum(getattr(each, name) for each in found)
                    for name in ("num_checked", "num_claimed_from_others", "num_not_stored")
                )
                print(
                    f"rollouts: {arguments.steps // len(STORES):,} steps on {world.size} ranks, stores of "
                    f"{store_bytes:,} bytes: {checked:,} completions trained once each, {others:,} prompt groups by "
                    f"another rank, {kept:,} without room, {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
        world.gather_objects(None)


if __name__ == "__main__":
    main()
