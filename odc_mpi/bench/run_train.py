"""`odc-mpi bench train`: training in every way side by side, for people or as one JSON object."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odc_mpi.bench.measure import speaker
from odc_mpi.bench.train import CONTENDERS, measure
from odc_mpi.data.prepare import prepare
from odc_mpi.report.wording import told_load
from odc_mpi.runtime.world import World
from odc_mpi.train.settings import CommConfig, Config, DataConfig, ModelConfig, OptimConfig, load

#: Where the quick start prepares its data set; the benchmark's own is the same.
DATA = Path("runs/data/stdlib.h5")
MAX_LENGTH = 1024
#: What is trained unless a configuration is given: a Qwen2 of 8 million parameters, a sequence or a few per microbatch.
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


def run(world: World, path: Path | None, steps: int, repeats: int, as_json: bool) -> None:
    """Compare all ways to train; rank 0 prints what came of it. Collective.

    Args:
        world: The ranks.
        path: Of a configuration of `odc-mpi train`; None for a small model on the built-in data set, which is prepared
            if it is not there.
        steps: Minibatches of a round.
        repeats: Rounds.
        as_json: Print one object.

    Raises:
        UserError: As for a run; on every rank.
    """
    say = speaker(world.rank)
    if path is None and world.rank == 0 and not DATA.exists():
        say(f"nothing yet: preparing {DATA} first")
        prepare("stdlib", DATA, max_length=MAX_LENGTH)
    world.meet(world.comm.Ibarrier(), "preparing the data set")
    config = world.agree(lambda: load(path) if path else _own(world.timeout_s))
    before = os.getloadavg()[0]
    result = {"benchmark": "train", "repeats": repeats, "steps": steps, **measure(world, config, steps, repeats, say)}
    result["load_average"] = [before, os.getloadavg()[0]]
    if world.rank == 0:
        print(json.dumps(result, allow_nan=False) if as_json else report(result), flush=True)


def report(result: Mapping[str, Any]) -> str:
    """Return the figures as a table with a heading. Local."""
    lines = [
        f"{result['library']}, {result['ranks']} ranks of {result['threads']} thread{'s'[: result['threads'] != 1]}, "
        f"{result['model_numel'] / 1e6:.1f} M parameters",
        f"reduction {result['reduction']}, zero-copy {result['zero_copy']}, progress {result['progress']}",
        f"{result['repeats']} rounds of {result['steps']} minibatches; {told_load(result)}",
        "",
        f"{'':22}{'tokens/s':>10}{'quartiles':>18}{'to FSDP2':>10}{'to ceiling':>12}",
    ]
    for name in CONTENDERS:
        low, high = result["quartiles"][name]
        lines.append(
            f"{name:22}{result['tokens_per_s'][name]:10,.0f}{f'{low:,.0f} to {high:,.0f}':>18}"
            f"{result['ratio_to_fsdp2'][name]:10.2f}{result['ratio_to_ceiling'][name]:12.2f}"
        )
    worst = max(result["loss_deviation"].values())
    first, *_, last = result["losses"]
    return "\n".join([*lines, "", f"Losses from {first:.3f} to {last:.3f}, alike within {worst:.1g} of the loss."])


def _own(timeout_s: float) -> Config:
    return Config(
        model=ModelConfig(config=MODEL),
        data=DataConfig(path=str(DATA), minibatch_sequences=16, max_tokens_per_microbatch=MAX_LENGTH),
        comm=CommConfig(timeout_s=timeout_s),
        optim=OptimConfig(learning_rate=1e-3),
    )
