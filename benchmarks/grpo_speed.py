"""Compare the speed of GRPO with that of TRL: completion tokens generated and trained per second.

    make run-rl                                                  # creates the model and the prompts
    python -m venv TRL && TRL/bin/pip install trl                # with torch of the same version
    python benchmarks/grpo_speed.py --trl TRL/bin/python [--rounds 5] [--steps 10]

The model, the prompts and the settings of jobs/grpo.yaml, one thread for each process:

    trl          GRPOTrainer, one process
    one          odc_mpi, one rank
    two          odc_mpi, two ranks, which share a step's completions
    apart        two processes at once that exchange nothing, each odc_mpi on one rank with half of the completions

The variants alternate in rounds, each in a new process; the start and the first step of a process are not counted.
Prints the tokens per second of each round, and medians over the rounds of each variant and of the ratios between them;
also per second of processor time, which is equivalent for processes that do not wait, and less disturbed by other load
on the machine. With `--lines FILE` rounds of several calls are evaluated together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

WAYS = ("trl", "one", "two", "apart")
RATIOS = (("one", "trl"), ("two", "one"), ("apart", "one"), ("two", "apart"))
CONFIG, PROMPTS = Path("jobs/grpo.yaml"), Path("runs/digits/prompts.jsonl")


def main() -> None:
    """Run all variants alternately, or run one and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="Python of an environment with trl; default: omit trl")
    parser.add_argument("--mpiexec", default="mpiexec")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lines", type=Path, help="file of rounds, one per line; rounds of this call are appended")
    parser.add_argument("--way", choices=WAYS, help="run only this variant, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        (with_trl if arguments.way == "trl" else with_odc_mpi)(arguments.way, arguments.steps)
        return
    rounds = []
    if arguments.lines and arguments.lines.exists():
        rounds = [json.loads(line) for line in arguments.lines.read_text().splitlines()]
    for turn in range(arguments.rounds):
        ways = [way for way in (*WAYS[turn % 4 :], *WAYS[: turn % 4]) if arguments.trl or way != "trl"]
        rounds.append({way: one_round(arguments, way) for way in ways})
        if arguments.lines:
            with arguments.lines.open("a") as file:
                file.write(json.dumps(rounds[-1]) + "\n")
        print(
            f"round {turn + 1}:", {way: round(found["tokens_per_s"]) for way, found in rounds[-1].items()}, flush=True
        )
    show(rounds)


def one_round(arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    """Run a variant in new processes, and return its output."""
    ranks = {"trl": [], "one": ["-n", "1"]}.get(way, ["-n", "2"])
    start = [arguments.mpiexec, *ranks, sys.executable] if ranks else [arguments.trl]
    command = [*start, __file__, "--way", way, "--steps", str(arguments.steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{way} failed: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def show(rounds: list[dict[str, Any]]) -> None:
    """Print medians of speeds and ratios."""
    for way in WAYS:
        found = [each[way] for each in rounds if way in each]
        if found:
            speed, cpu, generated = (
                statistics.median(each[key] or 0.0 for each in found)
                for key in ("tokens_per_s", "tokens_per_cpu_s", "generate_fraction")
            )
            output = f"{generated:.0%} generation, {len(found)} rounds; {found[-1]['versions']}"
            print(f"{way:6} {speed:7,.0f} tokens/s, {cpu:7,.0f} per second of a processor, {output}")
    for way, other in RATIOS:
        both = [(each[way], each[other]) for each in rounds if way in each and other in each]
        for key in ("tokens_per_s", "tokens_per_cpu_s") if both else ():
            ratios = sorted(one[key] / two[key] for one, two in both)
            output = f"{statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{key:16} {way} / {other}: {output}")


def with_odc_mpi(way: str, steps: int) -> None:
    """Train with the trainer of `odc-mpi train`, and print the figures on rank 0. Collective."""
    import numpy as np
    import torch
    import transformers

    from odc_mpi.runtime.world import World
    from odc_mpi.training.inputs import open_inputs
    from odc_mpi.training.resolved_settings import with_device
    from odc_mpi.training.run import build_trainer, decide
    from odc_mpi.training.settings import load

    torch.set_num_threads(1)
    with World() as world:
        alone = way == "apart"
        ranks, share, seed = (world.split("self"), 128, world.rank) if alone else (world, 256, 0)
        given = {"--rl.log_completions": 0, "--data.minibatch_sequences": share, "--run.seed": seed}
        config = with_device(load(CONFIG, [str(word) for pair in given.items() for word in pair]), "cpu")
        config = replace(config, data=replace(config.data, eval_path=None))
        inputs = ranks.run_on_all(lambda: open_inputs(config, ranks.rank, ranks.size))
        with build_trainer(config, ranks, inputs, decide(config, ranks)) as trainer:
            trainer.start()
            trainer.step()
            world.gather_objects(None)  # all begin together
            began, used = time.perf_counter(), time.process_time()
            metrics = [trainer.step() for _ in range(steps)]
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
            tokens = sum(each["num_input_tokens"] for each in metrics)
            everyone = np.array(world.gather_objects((tokens, seconds, cpu_s)))
            total = int(everyone[:, 0].sum()) if alone else tokens
            generated = sum(each["generate_s"] for each in metrics)
            trainer.model.close()
        if world.rank == 0:
            versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {world.mpi_library}"
            report(total, everyone[:, 1].max(), everyone[:, 2].sum(), generated / seconds, versions)


def with_trl(way: str, steps: int) -> None:
    """Train with TRL's trainer and the same settings, and print the figures."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    sys.path.insert(0, "jobs")
    from digits import right_digits

    output: dict[str, Any] = {"tokens": 0, "ends": []}

    def exact_match(
        completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        output["tokens"] += sum(map(len, completion_ids)) if output["ends"] else 0
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            output["ends"].append((time.perf_counter(), time.process_time()))

    torch.set_num_threads(1)
    settings = trl.GRPOConfig(
        output_dir="runs/trl",
        max_steps=steps + 1,
        per_device_train_batch_size=256,
        num_generations=16,
        max_completion_length=14,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        loss_type="dapo",
        beta=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    trainer = trl.GRPOTrainer(
        "runs/digits/model",
        reward_funcs=[exact_match, right_digits],
        args=settings,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Ends()],
    )
    trainer.train()
    seconds, cpu_s = (last - first for first, last in zip(output["ends"][0], output["ends"][-1], strict=True))
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    report(output["tokens"], seconds, cpu_s, None, versions)


def report(tokens: int, seconds: float, cpu_s: float, generate_fraction: float | None, versions: str) -> None:
    """Print the figures of a variant as JSON."""
    figures = {"tokens": tokens, "tokens_per_s": tokens / seconds, "tokens_per_cpu_s": tokens / cpu_s}
    print(json.dumps(figures | {"generate_fraction": generate_fraction, "versions": versions}), flush=True)


if __name__ == "__main__":
    main()
