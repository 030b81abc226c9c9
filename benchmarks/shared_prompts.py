"""Train GRPO on given completions, with prompts computed once per group, and once per completion for comparison.

    mpiexec -n 2 python benchmarks/shared_prompts.py [--prompt 512] [--completion 128] [--completions 8] [--beta]

The ranks train the same random groups in turns in both ways, each group in microbatches of its own, without generation:
forward, backward, optimizer step. Completions have `--completion` tokens on average, and between half and three halves
of it. `--unshared` trains only without sharing, as before. Both ways must have the same loss.

Keys: `groups_per_s` as quartiles over rounds, and `groups_per_cpu_s`, per second of processor time on rank 0, which
other processes affect less; `speedup` and `cpu_speedup`, medians of the ratios in each round; `tokens` that are
computed for a group; `peak_bytes`, the largest increase of a rank's resident memory in a step; `load_average` before
and after.
"""

import argparse
import ctypes
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from measure import header, interleaved, ratio, slowest_s

from odc_mpi.api import shard_model
from odc_mpi.data.groups import GroupMicrobatch, group_microbatches
from odc_mpi.data.prompt_group import Answer, PromptGroup
from odc_mpi.models.build import from_config
from odc_mpi.models.token_logps import TokenLogps, TokenScores
from odc_mpi.runtime.memory import peak_resident_bytes
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.recipes.grpo.objective import GRPOObjective
from odc_mpi.training.recipes.rollouts.settings import RLConfig

SHARED, UNSHARED = "shared", "unshared"
#: Options and their default values. `--groups` counts the groups of a rank in a step.
DEFAULTS = {
    "prompt": 512,
    "completion": 128,
    "completions": 8,
    "groups": 1,
    "rounds": 5,
    "max-tokens": 8192,
    "hidden": 512,
    "layers": 4,
    "vocabulary": 4096,
}
#: The optimizer's steps are small, so that the losses of both ways stay comparable.
LEARNING_RATE = 1e-6
TOLERANCE = 1e-5  # largest relative difference of losses, since sums are rounded in another order


@dataclass(frozen=True)
class Step:
    """A step: time of the slowest rank; processor time, loss, computed tokens and increase of memory of this rank."""

    seconds: float
    cpu_s: float
    loss: float
    num_tokens: int
    peak_bytes: int


def random_groups(arguments: argparse.Namespace, rank: int) -> list[PromptGroup]:
    """Return the groups that a rank trains."""
    draws = np.random.default_rng((7, rank))

    def answer() -> Answer:
        length = int(draws.integers(arguments.completion // 2, arguments.completion * 3 // 2 + 1))
        tokens = draws.integers(arguments.vocabulary, size=max(1, length))
        columns = {"logps": np.zeros(len(tokens), np.float32), "advantage": np.float64(draws.normal())}
        return Answer(tokens, np.ones(len(tokens), np.bool_), columns)

    return [
        PromptGroup(i, draws.integers(arguments.vocabulary, size=arguments.prompt), [answer() for _ in range(count)])
        for i, count in enumerate([arguments.completions] * arguments.groups)
    ]


def microbatches(groups: list[PromptGroup], max_tokens: int, name: str) -> Iterator[GroupMicrobatch]:
    """Yield the microbatches of each group, whose prompt is repeated for each completion if they do not share it."""
    for group in groups:
        parts = [group] if name == SHARED else [replace(group, answers=[answer]) for answer in group.answers]
        yield from group_microbatches(parts, max_tokens)


def measure(arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Train in both ways in turns, and return the JSON object. Collective."""
    torch.set_num_threads(1)
    settings = {
        "model_type": "llama",
        "vocab_size": arguments.vocabulary,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64,
        "num_key_value_heads": max(1, arguments.hidden // 256),
        "max_position_embeddings": arguments.prompt + 2 * arguments.completion,
    }
    meta = from_config(settings, seed=0)
    model = shard_model(meta.module, world, weights=meta.weights).eval()
    optimizer = torch.optim.AdamW(model.shard_parameters(), lr=LEARNING_RATE)
    token_logps, rl = TokenLogps(model.module), RLConfig(beta=0.1 if arguments.beta else 0.0)

    def reference(*inputs: Any) -> TokenScores:
        with torch.no_grad():  # the cost is that of a reference policy
            return token_logps(*inputs)

    objective = GRPOObjective(model.module, rl, arguments.groups, reference if rl.beta else None)
    groups = random_groups(arguments, world.rank)

    def train(name: str) -> Step:
        losses, tokens = [], []
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = peak_resident_bytes()

        def work() -> None:
            with model.minibatch():
                for microbatch in microbatches(groups, arguments.max_tokens, name):
                    loss = objective.loss(None, microbatch)  # type: ignore[arg-type]  # it is not used
                    loss.backward()
                    losses.append(loss.item())
                    tokens.append(microbatch.num_input_tokens)
            optimizer.step()
            model.publish()

        began = process_time()
        seconds = slowest_s(world, "a step", work)
        return Step(seconds, process_time() - began, math.fsum(losses), sum(tokens), peak_resident_bytes() - before)

    names = [UNSHARED] if arguments.unshared else [SHARED, UNSHARED]
    variants: dict[str, Callable[[], Step]] = {name: partial(train, name) for name in names}
    load = os.getloadavg()[0]
    results = {name: steps[1:] for name, steps in interleaved(variants, arguments.rounds + 1).items()}
    ranks = world.gather_objects(results)
    model.close()
    for rank, steps_of_rank in enumerate(ranks):
        first, last = (steps_of_rank[name][0].loss for name in (names[0], names[-1]))
        assert math.isclose(first, last, rel_tol=TOLERANCE, abs_tol=TOLERANCE), f"rank {rank}: losses {first}, {last}"
    num_groups = arguments.groups * world.size
    times = {name: [step.seconds for step in steps] for name, steps in results.items()}
    cpu_times = {name: [step.cpu_s for step in steps] for name, steps in results.items()}
    found = {
        name: {
            "groups_per_s": quartiles([num_groups / seconds for seconds in times[name]]),
            "groups_per_cpu_s": quartiles([arguments.groups / seconds for seconds in cpu_times[name]]),
            "tokens": sum(steps[name][0].num_tokens for steps in ranks) / num_groups,
            "peak_bytes": max(step.peak_bytes for steps in ranks for step in steps[name]),
        }
        for name in names
    }
    speedups = {}
    if not arguments.unshared:
        speedups = {
            name: ratio(seconds[UNSHARED], seconds[SHARED])
            for name, seconds in (("speedup", times), ("cpu_speedup", cpu_times))
        }
    return header(world, "shared_prompts", load, settings=vars(arguments), results=found, **speedups)


def main() -> None:
    """Print the result as JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in DEFAULTS.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--beta", action="store_true", help="also compute log-probabilities of a reference policy")
    parser.add_argument("--unshared", action="store_true", help="compute a prompt only once per completion")
    arguments = parser.parse_args()
    with World() as world:
        result = measure(arguments, world)
        if world.rank == 0:
            print(json.dumps(result))


if __name__ == "__main__":
    main()
