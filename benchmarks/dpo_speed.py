"""Compare the speed of DPO with that of TRL: useful tokens per second.

    python benchmarks/dpo_speed.py [--rounds 3] [--steps 3] [--layers 12] [--ways trl,shared]

Pairs have random tokens and the lengths of hh-rlhf (see `draw_counts`); the model is a Llama with the vocabulary of
SmolLM2 and 12 layers of width 384. A pair's useful tokens are those of the prompt and both answers, the prompt counted
twice. The log-probabilities of the reference model are computed in advance and not timed.

    trl          DPOTrainer, one process with two threads, 8 pairs per step
    shared       odc_mpi, one rank with two threads, 8 pairs per step
    unshared     the same, with a copy of the prompt for each answer
    two          odc_mpi, two ranks with one thread each, which share 16 pairs per step
    apart        two processes at once that exchange nothing, each odc_mpi with one thread and 8 pairs per step

The variants alternate in rounds, each in a new process; the start and the first step of a process are not counted.
Prints the useful tokens per second of each round, and medians over the rounds of the ratios between variants.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("trl", "shared", "unshared", "two", "apart")
RATIOS = (("shared", "trl"), ("unshared", "trl"), ("shared", "unshared"), ("two", "apart"))
VOCAB, PAIRS, SEED = 49_152, 8, 0
#: Characters per token, with which lengths in characters were converted.
CHARACTERS = 4


def main() -> None:
    """Run all variants alternately, or run one and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--way", choices=WAYS, help="run only this variant, in this process")
    arguments = parser.parse_args()
    if arguments.way:
        (with_trl if arguments.way == "trl" else with_odc_mpi)(arguments.way, arguments.steps, arguments.layers)
        return
    ways = arguments.ways.split(",")
    rounds: list[dict[str, float]] = []
    for turn in range(arguments.rounds):
        order = [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]
        rounds.append({way: one_round(arguments, way) for way in order})
        print(f"round {turn + 1}:", {way: round(speed) for way, speed in rounds[-1].items()}, flush=True)
    for way, other in RATIOS:
        ratios = sorted(each[way] / each[other] for each in rounds if way in each and other in each)
        if ratios:
            print(f"{way} / {other}: {statistics.median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")


def one_round(arguments: argparse.Namespace, way: str) -> float:
    """Run a variant in new processes, and return its useful tokens per second."""
    ranks = 2 if way in ("two", "apart") else 1
    start = [] if way == "trl" else [arguments.mpiexec, "-n", str(ranks)]
    command = [*start, sys.executable, __file__, "--way", way]
    command += ["--steps", str(arguments.steps), "--layers", str(arguments.layers)]
    environment = os.environ | {"OMP_NUM_THREADS": str(2 // ranks), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        sys.exit(f"{way} failed: {done.stderr[-2000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return float(json.loads(lines[-1])["tokens_per_s"])


def draw_counts(num_pairs: int) -> list[tuple[int, int, int]]:
    """Return the numbers of tokens of prompt, chosen and rejected answer of each pair.

    Log-normal lengths with the means of the harmless-base test set of hh-rlhf, 486, 168 and 211 characters, and with
    the spread for which the median ratio of the longer to the shorter answer is 2.14, as there.
    """
    rng = np.random.default_rng(SEED)
    spread = np.log(2.14) / (0.6745 * 2**0.5)
    means = np.array([486, 168, 211]) / CHARACTERS
    lengths = np.exp(np.log(means) - spread**2 / 2 + spread * rng.standard_normal((num_pairs, 3)))
    return [tuple(row) for row in np.maximum(1, lengths.round()).astype(int).tolist()]


def settings(layers: int) -> dict[str, Any]:
    """Return the configuration of the model."""
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }


def with_odc_mpi(way: str, steps: int, layers: int) -> None:
    """Train with the trainer of `odc-mpi train`, and print the figures on rank 0. Collective."""
    from odc_mpi.data import loader as loading
    from odc_mpi.data.dataset.format import PairCounts
    from odc_mpi.data.dataset.writer import DatasetWriter
    from odc_mpi.runtime.world import World
    from odc_mpi.training.inputs import open_inputs
    from odc_mpi.training.resolved_settings import with_device
    from odc_mpi.training.run import build_trainer, decide
    from odc_mpi.training.settings import load

    if way == "unshared":
        vars(loading)["read_pairs"] = read_unshared
    with World() as world, tempfile.TemporaryDirectory() as folder:
        ranks = world.split("self") if way == "apart" else world
        num_pairs = PAIRS * ranks.size
        counts = draw_counts(num_pairs * (steps + 1) * (world.size if way == "apart" else 1))
        counts = counts[world.rank :: world.size] if way == "apart" else counts
        path = Path(world.gather_objects(folder)[0]) if ranks is world else Path(folder)
        if ranks.rank == 0:
            # In the order in which the loader draws them.
            order = np.random.default_rng([SEED, 0]).permutation(len(counts))
            rng = np.random.default_rng(SEED)
            with DatasetWriter(path / "pairs.h5", vocab_size=VOCAB, tokenizer="none", source="random") as writer:
                for place in np.argsort(order):
                    prompt, chosen, rejected = counts[place]
                    tokens = rng.integers(1, VOCAB, prompt + chosen + rejected)
                    writer.append(tokens, np.arange(len(tokens)) >= prompt, PairCounts(prompt, chosen, chosen))
        world.gather_objects(None)
        given = {
            **{f"model.config.{key}": value for key, value in settings(layers).items()},
            "data.path": path / "pairs.h5",
            "data.minibatch_sequences": num_pairs,
            "data.max_tokens_per_microbatch": 8192,
            "run.objective": "dpo",
            "run.dir": path / "run",
            "run.seed": SEED,
            "run.steps": steps + 1,
            "model.param_dtype": "float32",
        }
        config = with_device(load(None, [f"--{key}={value}" for key, value in given.items()]), "cpu")
        config = replace(config, optim=replace(config.optim, learning_rate=1e-6))
        inputs = ranks.run_on_all(lambda: open_inputs(config, ranks.rank, ranks.size))
        with build_trainer(config, ranks, inputs, decide(config, ranks)) as trainer:
            (path / "run").mkdir(exist_ok=True)
            trainer.start()
            trainer.step()
            world.gather_objects(None)  # all begin together
            began = time.perf_counter()
            for _ in range(steps):
                trainer.step()
            seconds = time.perf_counter() - began
            tokens = useful(counts[num_pairs:])
            everyone = np.array(world.gather_objects((tokens, seconds)))
            trainer.model.close()
        if world.rank == 0:
            total = everyone[:, 0].sum() if way == "apart" else tokens
            report(total, everyone[:, 1].max())


def read_unshared(dataset: Any, indices: Any) -> Any:
    """Read pairs as `read_pairs` does, but with a copy of the prompt before each answer."""
    import torch

    from odc_mpi.data.pairs.microbatch import as_padded_rows, read_pairs

    rows, positions, targets, answers, lengths, begin = [], [], [], [], [], 0
    for place, index in enumerate(indices):
        pair = as_padded_rows(read_pairs(dataset, np.array([index])))
        padded = pair.inputs["input_ids"]
        prompt, chosen, _ = dataset.pair_counts[index].tolist()
        both = (prompt + chosen, int(dataset.lengths[index]) - chosen)
        for row, length in enumerate(both):
            own = pair.answers == row
            rows.append(padded[row, :length])
            positions.append(pair.logit_positions[own] - row * padded.shape[1] + begin)
            targets.append(pair.targets[own])
            answers.append(pair.answers[own] + 2 * place)
            lengths.append(length)
            begin += length
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return replace(
        pair,
        inputs={
            "input_ids": torch.cat(rows)[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "use_cache": False,
        },
        num_tokens=sum(map(len, targets)),
        num_input_tokens=begin,
        indices=indices,
        logit_positions=torch.cat(positions),
        targets=torch.cat(targets),
        answers=torch.cat(answers),
    )


def with_trl(way: str, steps: int, layers: int) -> None:
    """Train with TRL's trainer and the same settings, and print the figures."""
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.set_num_threads(2)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0")
    rng = np.random.default_rng(SEED)
    counts = draw_counts(PAIRS * (steps + 1))

    def text(count: int) -> str:
        return "".join(f"{token} " for token in rng.integers(1, VOCAB, count))

    rows = [
        {"prompt": text(prompt), "chosen": text(chosen - 1), "rejected": text(rejected - 1)}  # and the end of sequence
        for prompt, chosen, rejected in counts
    ]
    ends: list[float] = []

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    kind = transformers.AutoConfig.for_model(**settings(layers))
    with tempfile.TemporaryDirectory() as folder:
        configuration = trl.DPOConfig(
            output_dir=folder,
            max_steps=steps + 1,
            per_device_train_batch_size=PAIRS,
            max_length=None,
            learning_rate=1e-6,
            precompute_ref_log_probs=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
        )
        trainer = trl.DPOTrainer(
            transformers.AutoModelForCausalLM.from_config(kind),
            args=configuration,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Ends()],
        )
        trainer.train()
    report(useful(counts[PAIRS:]), ends[-1] - ends[0])


def useful(counts: list[tuple[int, int, int]]) -> int:
    """Return the number of useful tokens of pairs."""
    return sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in counts)


def report(tokens: float, seconds: float) -> None:
    """Print the figures of a variant as JSON."""
    print(json.dumps({"tokens": int(tokens), "tokens_per_s": tokens / seconds}), flush=True)


if __name__ == "__main__":
    main()
