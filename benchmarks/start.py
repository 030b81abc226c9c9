"""Measure how long training takes to start on one node, by phase, number of ranks and number of units.

    python benchmarks/start.py [--config FILE | --units 8,50] [--ranks 2,4,8,16] [--json]

Each measurement is a run of `odc-mpi train` for a few steps: with `--config`, or else of a small model with each number
of units (its layers and the root). The phases are those of `start_s` in summary.json, in seconds on the slowest rank.
The script fails if the losses on different numbers of ranks differ by more than rounding.

If there are fewer cores (C) than ranks (R), ranks share cores. If each rank had its own core, a phase would take about
C / R of the measured time. The prediction for many ranks uses these reduced times. For a phase that communicates, it
extrapolates a line fitted to the times as a function of R. For other phases, and if the line does not rise, it is the
median. Slower networks, and file systems that many nodes read at the same time, are not modeled.

The JSON object has in `starts`, for each run, `ranks`, `units` (null with `--config`), `start_s`, `host_bytes` (peak
memory of the rank that uses the most) and `losses`. `predicted_s` has the seconds by phase on `predicted_ranks` ranks
with the last number of units, or is null for a single number of ranks.
"""

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "tests" / "launch"))
from mpi_launch import odc_mpi

from odc_mpi.data.dataset.writer import DatasetWriter

STEPS = 3
#: Number of ranks for which times are predicted.
MANY_RANKS = 1024
#: Phases that communicate and can therefore take longer with more ranks.
COMMUNICATING = ("mpi", "probe", "windows", "weights", "other")
#: Maximum relative difference between losses, which differ because fp32 values are summed in a different order.
TOLERANCE = 1e-5
#: Default model, without the number of layers. Its units are the layers, of 0.1 million parameters each, and the root.
MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Run all starts, check their losses, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="as for odc-mpi train; default: small models")
    parser.add_argument("--ranks", type=_counts, default=[2, 4, 8, 16], help="default: 2,4,8,16")
    parser.add_argument("--units", type=_counts, default=[8, 50], help="of the small models; default: 8,50")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of each run; default: 900")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="odc_mpi-start-") as name:
        directory = Path(name)
        configs = (
            {None: arguments.config.absolute()} if arguments.config else _write_configs(directory, arguments.units)
        )
        starts = [
            {"ranks": ranks, "units": units, **_start(config, ranks, directory, arguments.timeout_s)}
            for units, config in configs.items()
            for ranks in arguments.ranks
        ]
    _check_losses(starts)
    cores = len(os.sched_getaffinity(0))
    last_model = [start for start in starts if start["units"] == starts[-1]["units"]]
    result = {
        "benchmark": "start",
        "cores": cores,
        "steps": STEPS,
        "config": str(arguments.config) if arguments.config else None,
        "load_average": [before, os.getloadavg()[0]],
        "starts": starts,
        "predicted_ranks": MANY_RANKS,
        "predicted_s": _predict(last_model, cores) if len(last_model) > 1 else None,
    }
    print(json.dumps(result) if arguments.json else _table(result), flush=True)


def _counts(text: str) -> list[int]:
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 2:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 2, such as 2,4,8, got {text!r}")
    return list(dict.fromkeys(counts))


def _write_configs(directory: Path, units: list[int]) -> dict[int | None, Path]:
    """Write a data set of random tokens and a configuration for each number of units. Return the configurations."""
    rng = np.random.default_rng(0)
    data = directory / "random.h5"
    with DatasetWriter(data, vocab_size=MODEL["vocab_size"], tokenizer="none", source="random") as writer:
        for length in rng.integers(8, 64, size=256):
            writer.append(rng.integers(MODEL["vocab_size"], size=length, dtype=np.uint32), np.ones(length, dtype=bool))
    configs: dict[int | None, Path] = {}
    for num_units in units:
        settings = {
            "model": {"config": MODEL | {"num_hidden_layers": num_units - 1}},
            "data": {"path": str(data), "minibatch_sequences": 32, "max_tokens_per_microbatch": 128},
            "run": {"threads": 1, "device": "cpu"},
        }
        configs[num_units] = directory / f"units-{num_units}.yaml"
        configs[num_units].write_text(json.dumps(settings))  # which is also YAML
    return configs


def _start(config: Path, ranks: int, directory: Path, timeout_s: float) -> dict[str, Any]:
    run = Path(tempfile.mkdtemp(dir=directory)) / "run"
    settings = ("--run.steps", STEPS, "--run.resume", "never", "--run.dir", run)
    done = odc_mpi(ranks, "train", "--config", config, *settings, timeout_s=timeout_s)
    if done.code:
        raise SystemExit(f"{done.err}\nthe run on {ranks} ranks ended with exit code {done.code}")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "start_s": json.loads((run / "summary.json").read_text())["start_s"],
        "host_bytes": steps[-1]["peak_host_bytes"],
        "losses": [step["loss"] for step in steps if "loss" in step],
    }


def _check_losses(starts: list[dict[str, Any]]) -> None:
    expected = {start["units"]: start["losses"] for start in reversed(starts)}
    for start in starts:
        for a, b in zip(start["losses"], expected[start["units"]], strict=True):
            if None in (a, b) or not math.isclose(a, b, rel_tol=TOLERANCE):
                raise SystemExit(f"the losses on {start['ranks']} ranks differ from those on fewer ranks: {a}, {b}")


def _predict(starts: list[dict[str, Any]], cores: int) -> dict[str, float]:
    """Return the predicted seconds of each phase on `MANY_RANKS` ranks with one core each, and their sum as `total`."""
    ranks = np.array([start["ranks"] for start in starts], dtype=float)
    predicted = {}
    for phase in starts[0]["start_s"]:
        seconds = np.array([start["start_s"][phase] for start in starts]) * np.minimum(1.0, cores / ranks)
        slope, intercept = np.polyfit(ranks, seconds, 1)
        grows = phase in COMMUNICATING and slope > 0
        predicted[phase] = float(intercept + MANY_RANKS * slope) if grows else float(np.median(seconds))
    return predicted | {"total": sum(value for phase, value in predicted.items() if phase != "total")}


def _table(result: dict[str, Any]) -> str:
    phases = list(result["starts"][0]["start_s"])
    rows = [["ranks", "units", *phases, "MiB"]]
    rows += [
        [str(start["ranks"]), str(start["units"] or "-"), *_format(start["start_s"]), str(start["host_bytes"] >> 20)]
        for start in result["starts"]
    ]
    if result["predicted_s"]:
        rows.append([f"{MANY_RANKS}*", rows[-1][1], *_format(result["predicted_s"]), "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join([*lines, f"Seconds on {result['cores']} cores, {STEPS} steps. * predicted, not measured"])


def _format(seconds: dict[str, float]) -> list[str]:
    return [f"{value:.2f}" for value in seconds.values()]


if __name__ == "__main__":
    main()
