"""Measure GRPO with `rl.max_staleness` on real ranks that sleep instead of decoding and training.

    mpiexec -n 8 python benchmarks/rollout_speed.py --per-rank 8 --speed-variation 0.1 [--scale 0.02] [--json]

Everything else is real: prompts are claimed with tickets, groups are published in stores and claimed from them, and
ranks synchronize at the end of each step. A tiny model is trained on completions of two tokens, and a rank sleeps for
as long as decoding and training on completions of the scenario would take, times `--scale`. The options are those of
`rollout_schedules.py`, whose simulation runs on the same completions and speeds.

The JSON object has, for each staleness, `step_s` (divided by the scale), `speedup` over staleness 0, and `simulated`.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import transformers
from gpu_setup import prepare
from measure import Measure, run_program
from rollout_schedules import RolloutScenario, SimulatedRollouts, add_options, build_scenario, rollout_works
from stale_rollouts import RolloutWork, StaleRollouts
from typing_extensions import override

from odc_mpi.data.microbatch import Microbatch
from odc_mpi.data.prompt_group import PromptGroup
from odc_mpi.models.decoding import Prompt
from odc_mpi.rollout.decode import PromptBatch
from odc_mpi.rollout.sampling import PromptCompletions
from odc_mpi.runtime.world import World
from odc_mpi.training.context import RunContext
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.recipes.rollouts import source
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.run import build_trainer, decide

#: Tokens that a call of `step` stands for: sleeps of single tokens would be too short to be exact.
BLOCK = 32
REWARDS = "def alternate(completions, **columns): return [float(i % 2) for i in range(len(completions))]"


class SleepingBatch(PromptBatch):
    """Batch that sleeps for as long as decoding would take. `works` are the steps."""

    works: Sequence[RolloutWork]
    scenario: RolloutScenario
    scale: float
    rank: int

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._left: dict[int, Any] = {}

    @property
    @override
    def num_free(self) -> int:
        rows = sum(int(np.count_nonzero(left)) for left in self._left.values())
        return max(0, (self.scenario.max_rows - rows) // self.scenario.completions)

    @override
    def add(self, prompts: Mapping[int, Prompt], step: int) -> None:
        for key in prompts:
            number, position = divmod(key, self.scenario.num_groups)
            self._left[key] = self.works[number - 1].lengths[position].copy()
        self.prompts |= dict.fromkeys(prompts)  # type: ignore[arg-type]

    @override
    def step(self, step: int, on_token: Callable[[int], None] = lambda token: None) -> None:
        on_token(1)
        rows = np.concatenate(list(self._left.values()))
        tokens = min(BLOCK, int(rows[rows > 0].min()))
        constant, each = self.scenario.decode_step_s, self.scenario.decode_sequence_s
        self.sleep(step, tokens * (constant + each * np.count_nonzero(rows)))
        for left in self._left.values():
            left -= np.minimum(left, tokens)
        for key in [key for key, left in self._left.items() if not left.any()]:
            del self._left[key], self.prompts[key]
            count = self.scenario.completions
            steps = [np.full(2, step, np.int64)] * count
            logps = [np.full(2, -6.0, np.float32)] * count
            self._on_prompt_done(key, PromptCompletions([[1, 2]] * count, logps, [True] * count, 1.0, steps))

    @classmethod
    def sleep(cls, step: int, seconds: float) -> None:
        """Sleep for as long as work of `seconds` takes on this rank in `step`."""
        time.sleep(seconds * cls.scale / cls.works[step - 1].speeds[cls.rank])


def run(world: World, scenario: RolloutScenario, max_staleness: int, scale: float) -> dict[str, float]:
    """Train all steps of the scenario; return the mean seconds of a step and the staleness. Collective."""
    works = rollout_works([SimulatedRollouts(scenario, each) for each in scenario.minibatches()])
    SleepingBatch.works, SleepingBatch.scenario = works, scenario
    SleepingBatch.scale, SleepingBatch.rank = scale, world.rank
    pack = source.RolloutSource._pack

    def sleep_and_pack(rollouts: source.RolloutSource, groups: list[PromptGroup]) -> Iterator[Microbatch]:
        step = rollouts._steps[0]
        positions = {int(index): position for position, index in enumerate(step.minibatch.indices)}
        SleepingBatch.sleep(step.number, math.fsum(works[step.number - 1].train_s[positions[g.index]] for g in groups))
        return pack(rollouts, groups)

    with prepare(world, None, "cpu", 0, 0, lambda line: None, tiny=True) as setup:
        data, rewards = setup.folder / "prompts.jsonl", setup.folder / "rewards.py"
        data.write_text("".join(f'{{"prompt": "{i % 500}"}}\n' for i in range(len(works) * scenario.num_groups)))
        rewards.write_text(REWARDS)
        rl = RLConfig(
            reward_funcs=[f"{rewards}:alternate"],
            tokenizer=str(setup.tokenizer),
            num_generations=scenario.completions,
            max_completion_length=2,
            max_staleness=max_staleness,
        )
        config = setup.config(data, scenario.num_groups * scenario.completions, objective="grpo", rl=rl)
        config = replace(config, run=replace(config.run, steps=len(works)))
        inputs = open_inputs(config, world.rank, world.size)
        with (
            patch.object(source, "prompt_batch", SleepingBatch),
            patch.object(source.RolloutSource, "_pack", sleep_and_pack),
            build_trainer(RunContext(config, world, inputs=inputs, decision=decide(config, world))) as trainer,
        ):
            trainer.start()
            began = time.perf_counter()
            lines = [trainer.step() for _ in works]
            seconds = (time.perf_counter() - began) / len(works)
            world.gather_objects(None)
            trainer.model.close()
        inputs.close()
    mean = statistics.fmean(line.get("staleness/mean", 0.0) for line in lines)
    largest = max(line.get("staleness/max", 0) for line in lines)
    return {"step_s": seconds / scale, "staleness_mean": mean, "staleness_max": largest}


def measure(
    scenario: RolloutScenario, staleness: Sequence[int], scale: float, world: World, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure each staleness, and simulate it."""
    scenario = replace(scenario, ranks=world.size)
    works = rollout_works([SimulatedRollouts(scenario, each) for each in scenario.minibatches()])
    results: dict[str, Any] = {}
    for each in dict.fromkeys([0, *staleness]):
        report(f"staleness {each}")
        found = run(world, scenario, each, scale)
        simulated = StaleRollouts(scenario, works, each).step_ends_s()[-1] / len(works)
        base = results.get("0", {"step_s": found["step_s"], "simulated_s": simulated})
        results[str(each)] = {
            **found,
            "simulated_s": simulated,
            "speedup": base["step_s"] / found["step_s"],
            "simulated": base["simulated_s"] / simulated,
        }
    return {"benchmark": "rollout_speed", "ranks": world.size, "staleness": results}


def main() -> int:
    """Run the program, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--scale", type=float, default=0.02, help="seconds of sleep per second of work; default: 0.02")
    parser.add_argument("--staleness", type=int, nargs="*", default=[1, 2], help="default: 1 2")
    transformers.utils.logging.disable_progress_bar()

    def prepared(arguments: argparse.Namespace) -> Measure:
        return partial(measure, build_scenario(arguments), arguments.staleness, arguments.scale)

    return run_program(parser, prepared)


if __name__ == "__main__":
    sys.exit(main())
