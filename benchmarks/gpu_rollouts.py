"""Completions and steps with rewards on one rank, compared with transformers; for `gpu_models.py`."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gpu_references import Padded, generate, greedy, load
from gpu_setup import ODC, TRANSFORMERS, Setup
from gpu_step import figures
from measure import interleaved, ratio
from train_speed import Contender
from typing_extensions import override

from odc_mpi.errors import UserError
from odc_mpi.generation.generate import SamplingParams
from odc_mpi.generation.generate import generate as generate_one
from odc_mpi.generation.load import GenerationModel
from odc_mpi.generation.run import shard
from odc_mpi.models.decoding import Prompt, unsharded_if_fits
from odc_mpi.models.load import load_model
from odc_mpi.rollout.decode import sample
from odc_mpi.rollout.sampling import RolloutSamplingParams
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.inputs import Inputs, open_inputs
from odc_mpi.training.loop import Trainer
from odc_mpi.training.recipes.rollouts.settings import RLConfig
from odc_mpi.training.settings import Config

#: About half of the completions match, of random numbers and of English text.
PATTERN = r"[0-4a-m]\W*$"


def generation(setup: Setup) -> dict[str, Any]:
    """Measure greedy completions."""
    sizes, random = setup.sizes, np.random.default_rng(0)
    prompts = [
        Prompt(i, random.integers(0, setup.vocab_size, size=random.integers(8, 33)).tolist(), ())
        for i in range(sizes.prompts)
    ]
    reference = load(setup.model, torch.bfloat16, setup.device.torch_device).eval()
    meta_model = load_model(setup.model, 0, 1, "sdpa", None)
    for parameter in meta_model.module.parameters():
        parameter.data = parameter.data.bfloat16()
    model = shard(GenerationModel("", meta_model, None, ()), setup.kind, setup.world)

    def rollouts() -> list[list[int]]:
        found: dict[int, list[int]] = {}
        sampling = RolloutSamplingParams(1, sizes.new_tokens, temperature=0.0)
        with unsharded_if_fits(model):
            sample(model.module, prompts, sampling, lambda i, done: found.update({i: done.tokens[0]}))
        return [found[i] for i in range(len(prompts))]

    def one() -> list[list[int]]:
        with unsharded_if_fits(model):
            return [generate_one(model.module, prompts[0], SamplingParams(sizes.new_tokens)).tokens]

    variants = {
        TRANSFORMERS: partial(greedy, reference, prompts, sizes.new_tokens),
        ODC: rollouts,
        f"{TRANSFORMERS}_one": partial(greedy, reference, prompts[:1], sizes.new_tokens),
        f"{ODC}_one": one,
    }
    rounds = interleaved(
        {name: partial(_timed, variant) for name, variant in variants.items()},
        setup.repeats + 1,
        lambda turn, name: setup.report(f"generation, round {turn}: {name}"),
    )
    model.close()
    seconds = {name: [time_s for time_s, _ in done[1:]] for name, done in rounds.items()}
    tokens = {name: done[-1][1] for name, done in rounds.items()}
    count = {name: sum(map(len, of_contender)) for name, of_contender in tokens.items()}
    first, common = {}, {}
    for name in (ODC, f"{ODC}_one"):
        expected = tokens[name.replace(ODC, TRANSFORMERS)]
        equal = [_num_equal(mine, theirs) for mine, theirs in zip(tokens[name], expected, strict=True)]
        first[name], common[name] = sum(n > 0 for n in equal) / len(equal), sum(equal) / count[name]
    if first[ODC] < 0.5:
        raise UserError(f"expected the first tokens of transformers, got them for {first[ODC]:.0%} of the prompts")
    return {
        "prompts": sizes.prompts,
        "new_tokens": sizes.new_tokens,
        "tokens_per_s": {name: quartiles([count[name] / each for each in times]) for name, times in seconds.items()},
        "of_transformers": {
            name: ratio(seconds[name.replace(ODC, TRANSFORMERS)], seconds[name]) for name in (ODC, f"{ODC}_one")
        },
        "equal_first": first,
        "equal_tokens": common,
    }


def _timed(variant: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    tokens = variant()  # in host memory: the GPU has finished
    return time.perf_counter() - began, tokens


def _num_equal(mine: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1]), len(mine))


def rewards(setup: Setup) -> dict[str, Any]:
    """Measure steps of GRPO."""
    sizes, random = setup.sizes, np.random.default_rng(0)
    path = setup.folder / "prompts.jsonl"
    texts = [" ".join(map(str, random.integers(1, setup.vocab_size, size=random.integers(8, 33)))) for _ in range(64)]
    path.write_text("".join(json.dumps({"prompt": text, "pattern": PATTERN}) + "\n" for text in texts))
    rl = RLConfig(
        reward_funcs=["regex"],
        tokenizer=str(setup.tokenizer),
        num_generations=sizes.num_generations,
        max_completion_length=sizes.new_tokens,
        log_completions=0,
    )
    config = setup.config(path, sizes.groups * sizes.num_generations, rl=rl, objective="grpo")
    contenders = setup.contenders("rewards")
    spans: dict[str, list[dict[str, float]]] = {}

    def padded() -> Contender:
        inputs = open_inputs(config, 0, 1)
        built = PaddedRollouts(config, inputs, setup.device.torch_device, setup.finish)
        spans[TRANSFORMERS] = built.spans
        return built.step

    def odc() -> Contender:
        built = OdcRollouts(contenders.build_trainer(ODC, config, setup.world))
        spans[ODC] = built.spans
        return built.step

    contenders.add(TRANSFORMERS, padded)
    contenders.add(ODC, odc)
    rounds = contenders.run(1, setup.repeats)
    contenders.close()
    # Without the steps before the rounds and in the round that warms up.
    means = {
        name: {key: statistics.mean(step[key] for step in of_contender[2:]) for key in of_contender[0]}
        for name, of_contender in spans.items()
    }
    return {
        **figures(rounds, TRANSFORMERS),
        "phases": means,
        "completions": sizes.groups * sizes.num_generations,
        "new_tokens": sizes.new_tokens,
        "peak_bytes": contenders.memory.peaks,
        "left_out": contenders.left_out,
    }


class OdcRollouts:
    """Contender that runs steps of GRPO, and measures the phases of each.

    Attributes:
        spans: Of each step: `generate_s`, `reward_s`, `train_s`, and `equal`, the share of groups without a gradient.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._reward_s = 0.0
        self.spans: list[dict[str, float]] = []
        self._score = trainer._source._score_group
        trainer._source._score_group = self._timed_score

    def step(self) -> tuple[float, int]:
        """Run a step of GRPO."""
        self._reward_s = 0.0
        metrics = self._trainer.step()
        generate_s = metrics["generate_s"]
        self.spans.append(
            {
                "generate_s": generate_s - self._reward_s,
                "reward_s": self._reward_s,
                "train_s": metrics["step_s"] - generate_s - metrics["rollout_wait_s"],
                "equal": metrics["frac_reward_zero_std"],
            }
        )
        return metrics["loss"], metrics["num_input_tokens"]

    def _timed_score(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        group = self._score(*arguments)
        self._reward_s += time.perf_counter() - began
        return group


@dataclass(frozen=True)
class Completions:
    """Prompts with completions as a minibatch of `Padded`: pairs of tokens, and which of them are trained."""

    dataset: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]
    num_tokens: int

    @property
    def indices(self) -> range:
        """All."""
        return range(len(self.dataset))

    @property
    def num_input_tokens(self) -> int:
        """Tokens of completions, as odc_mpi counts them."""
        return self.num_tokens


class PaddedRollouts(Padded):
    """Contender that samples completions with `generate`, and trains on them: as much work as a step of GRPO.

    Attributes:
        spans: Seconds of each step: `generate_s`, `reward_s`, `train_s`.
    """

    def __init__(self, config: Config, inputs: Inputs, device: torch.device, finish: Callable[[], None]) -> None:
        rl = config.rl
        self._prompts = [inputs.dataset[i].tokens for i in range(len(inputs.dataset))]  # type: ignore[union-attr]
        self._num_groups = config.data.minibatch_sequences // rl.num_generations
        self._settings = {
            "do_sample": True,
            "temperature": rl.temperature,
            "top_k": rl.top_k,
            "top_p": rl.top_p,
            "max_new_tokens": rl.max_completion_length,
            "num_return_sequences": rl.num_generations,
        }
        self._finish = finish
        self.spans: list[dict[str, float]] = []
        super().__init__(config, inputs, device, self._rollouts())

    @override
    def step(self) -> tuple[float, int]:
        began = time.perf_counter()
        done = super().step()
        self._finish()
        span = self.spans[-1]
        span["train_s"] = time.perf_counter() - began - span["generate_s"]
        return done

    def _rollouts(self) -> Iterator[Completions]:
        while True:
            began = time.perf_counter()
            prompts = self._prompts[: self._num_groups]
            self._prompts = self._prompts[self._num_groups :] + prompts
            completions = generate(self._model.eval(), prompts, **self._settings)
            self._model.train()
            rows = []
            for i, tokens in enumerate(completions):
                prompt = prompts[i // self._settings["num_return_sequences"]]
                trained = np.arange(len(prompt) + len(tokens)) >= len(prompt)
                rows.append((np.array([*prompt, *tokens], dtype=np.int64), trained))
            self.spans.append({"generate_s": time.perf_counter() - began, "reward_s": 0.0})
            yield Completions(rows, sum(map(len, completions)))
