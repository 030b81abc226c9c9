"""Compare one rank of odc_mpi on a GPU with transformers and peft: generation, fine-tuning, and steps with rewards.

    mpiexec -n 1 python benchmarks/gpu_models.py [--parts generation full lora rewards] [--model DIR] [--repeats 2]
    mpiexec -n 1 python benchmarks/gpu_models.py --tiny --device cpu       # checks the script without a GPU

The model has the architecture of SmolLM2-135M and random weights, unless --model is its directory; bfloat16, with fp32
masters where all parameters are trained. Both sides run the same prompts and minibatches in rounds, as in `gpu.py`.

    generation   greedy completions of 32 prompts in one batch, and of one prompt: `transformers`, `odc_mpi` as in
                 rollouts, `transformers_one`, `odc_mpi_one` as in `odc-mpi generate`
    full         fine-tuning: `transformers` pads batches of 8 sequences, `plain` is `gpu_step.Plain` and packs as
                 `odc_mpi` does; lengths are log-normal
    lora         the same with adapters, r 16, on the projections of attention: `transformers` is peft
    rewards      a step of GRPO with 8 completions of each of 8 prompts: `odc_mpi`, and `transformers`, which samples as
                 many tokens with `generate` and trains on them

Prints the object as a line of JSON after each part; the last line has all results.

    left_out     {part: reason}; the exit code is 1 if a part or a contender failed, or losses differ (`agreement`)
    generation   tokens_per_s by variant; of_transformers, medians of ratios in the same round; equal_first: share of
                 the prompts with the same first token; equal_tokens: share of the tokens before the first difference,
                 which near ties cause in bfloat16
    full, lora   as `step` of gpu.py, compared with `transformers`; lengths
    rewards      seconds and tokens_per_s (of completions), overhead, peak_bytes; and phases, by variant: means per step
                 of generate_s, reward_s (0 with transformers), train_s, equal (share of prompts without a gradient)
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_rollouts
import numpy as np
import torch
import transformers
from gpu_references import Padded
from gpu_setup import ODC, TRANSFORMERS, Setup, prepare
from gpu_step import PLAIN, failed, run
from measure import header, make_progress_printer

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import UserError, one_line_message
from odc_mpi.runtime.ranks import run_on_all_ranks
from odc_mpi.runtime.world import World
from odc_mpi.simulate.events import quartiles
from odc_mpi.training.inputs import open_inputs
from odc_mpi.training.settings import LoraConfig


def finetuning(setup: Setup, name: str, lora: LoraConfig) -> dict[str, Any]:
    """Measure fine-tuning, of adapters if `lora.r` is set."""
    sizes, random = setup.sizes, np.random.default_rng(0)
    path = setup.folder / f"{name}.h5"
    lengths = np.exp(random.normal(np.log(sizes.median_length), 0.8, size=8 * sizes.sequences)).astype(int)
    lengths = lengths.clip(4, sizes.max_length)
    with DatasetWriter(path, vocab_size=setup.vocab_size, tokenizer="none", source="Zipf's law") as writer:
        for length in lengths:
            tokens = (random.zipf(1.2, size=length) % setup.vocab_size).astype(np.uint32)
            writer.append(tokens, np.ones(length, dtype=bool))
    config = setup.config(path, sizes.sequences, learning_rate=2e-5 if lora.r is None else 2e-4, lora=lora)
    contenders = setup.contenders(name)
    contenders.add(TRANSFORMERS, lambda: Padded(config, open_inputs(config, 0, 1), setup.device.torch_device).step)
    if lora.r is None:
        contenders.add(PLAIN, lambda: contenders.plain(config))
    contenders.add(ODC, lambda: contenders.trainer(ODC, config, setup.world))
    return {"lengths": quartiles(lengths.tolist()), **run(contenders, config, setup.steps, setup.repeats)}


PARTS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    "generation": gpu_rollouts.generation,
    "full": lambda setup: finetuning(setup, "full", LoraConfig()),
    "lora": lambda setup: finetuning(
        setup, "lora", LoraConfig(r=16, alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    ),
    "rewards": gpu_rollouts.rewards,
}


def main() -> int:
    """Measure all parts, print the object after each, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="by default all")
    parser.add_argument("--model", type=Path, help="directory of SmolLM2 or another model, with its tokenizer")
    parser.add_argument("--steps", type=int, default=4, help="minibatches per round of full and lora")
    parser.add_argument("--repeats", type=int, default=2, help="rounds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    given = parser.parse_args()
    world = World()
    result: dict[str, Any] = {}

    def work() -> None:
        if world.size > 1:
            raise UserError(f"expected 1 rank, got {world.size}: mpiexec -n 1")
        report = make_progress_printer(world.rank)
        with prepare(world, given.model, given.device, given.steps, given.repeats, report, tiny=given.tiny) as setup:
            measure(setup, given.parts, result)

    return run_on_all_ranks(world, work) or int(failed(result))


def measure(setup: Setup, parts: list[str], result: dict[str, Any]) -> None:
    """Measure parts, add each to `result`, and print it. A part that fails is in `left_out`."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    weights = "random" if setup.tokenizer.parent == setup.folder else str(setup.tokenizer)
    load = os.getloadavg()[0]
    result |= header(setup.world, "gpu_models", load, devices=[setup.device.name], **versions, weights=weights)
    result["left_out"] = {}
    for name in parts:
        try:
            with setup.world.split("self") as self_world:  # frees all memory, also after an error
                result[name] = PARTS[name](replace(setup, world=self_world))
        except Exception as error:  # the others are measured all the same
            result["left_out"][name] = f"failed: {type(error).__name__}: {one_line_message(error)}"
        print(json.dumps(result), flush=True)
        gc.collect()
        if setup.kind == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
