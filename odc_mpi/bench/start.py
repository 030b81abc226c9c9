"""Benchmark of how long training takes to start on one node, by phase, number of ranks and number of units.

Each measurement is a run of `odc-mpi train` for a few steps. The phases are those of `start_s` in summary.json. The
time of a phase is that of the slowest rank.

If there are fewer cores (C) than ranks (R), ranks share cores. If each rank had its own core, a phase would take about
C / R of the measured time. The prediction for many ranks uses these reduced times. For a phase that communicates, it
extrapolates a line fitted to the times as a function of R. For other phases, and if the line does not rise, it is the
median. Slower networks, and file systems that many nodes read at the same time, are not modeled.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from odc_mpi.data.dataset.writer import DatasetWriter
from odc_mpi.errors import UserError

#: Number of steps in each run.
STEPS = 3
#: Number of ranks for which times are predicted.
MANY_RANKS = 1024
#: Phases that communicate and can therefore take longer with more ranks.
COMMUNICATING = ("mpi", "probe", "windows", "weights", "other")
#: Maximum relative difference between losses, which differ because fp32 values are summed in a different order.
TOLERANCE = 1e-5
#: Default model, without the number of layers. Its units are the layers, of 0.1 million parameters each, and the root.
_MODEL: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}

#: Function that runs `odc-mpi train` on a number of ranks with the given arguments, and returns the exit code.
Train = Callable[[int, Sequence[str]], int]


def measure(
    train: Train, config: Path | None, ranks: Sequence[int], units: Sequence[int], report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure how long training takes to start, in one run for each number of ranks.

    All runs use `config`. If it is None, each number of ranks is instead combined with each number of units, in the
    default model. `train` starts the runs, and `report` is called with a line of text before each of them.

    Returns the JSON object of the benchmark. Each entry of `starts` in this object has the keys `ranks`, `units` (None
    with `config`), `start_s` (seconds by phase), `host_bytes` (peak memory of the rank that uses the most) and
    `losses`. `predicted_s` contains the predicted seconds by phase for `MANY_RANKS` ranks and `config`, or the last
    number of units. It is None if `ranks` has only one element.

    Raises `UserError` if a run fails, or if its losses differ by more than rounding from those on the first number of
    ranks.
    """
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="odc_mpi-start-") as name:
        directory = Path(name)
        configs = {None: config} if config else _default_configs(directory, units)
        starts = []
        for num_units, path in configs.items():
            for num_ranks in ranks:
                report(f"a start on {num_ranks} ranks" + (f", {num_units} units" if num_units else ""))
                starts.append({"ranks": num_ranks, "units": num_units, **_start(train, path, num_ranks, directory)})
            _check_losses([start for start in starts if start["units"] == num_units])
    cores = len(os.sched_getaffinity(0))
    last_model = [start for start in starts if start["units"] == starts[-1]["units"]]
    return {
        "benchmark": "start",
        "cores": cores,
        "steps": STEPS,
        "config": str(config) if config else None,
        "load_average": [before, os.getloadavg()[0]],
        "starts": starts,
        "predicted_ranks": MANY_RANKS,
        "predicted_s": _predict(last_model, cores) if len(last_model) > 1 else None,
    }


def _default_configs(directory: Path, units: Iterable[int]) -> dict[int | None, Path]:
    rng = np.random.default_rng(0)
    data = directory / "random.h5"
    with DatasetWriter(data, vocab_size=_MODEL["vocab_size"], tokenizer="none", source="random") as writer:
        for length in rng.integers(8, 64, size=256):
            writer.append(rng.integers(_MODEL["vocab_size"], size=length, dtype=np.uint32), np.ones(length, dtype=bool))
    configs: dict[int | None, Path] = {}
    for num_units in units:
        settings = {
            "model": {"config": _MODEL | {"num_hidden_layers": num_units - 1}},
            "data": {"path": str(data), "minibatch_sequences": 32, "max_tokens_per_microbatch": 128},
            "run": {"threads": 1, "device": "cpu"},
        }
        configs[num_units] = directory / f"units-{num_units}.yaml"
        configs[num_units].write_text(json.dumps(settings))  # which is also YAML
    return configs


def _start(train: Train, config: Path, num_ranks: int, directory: Path) -> dict[str, Any]:
    run = Path(tempfile.mkdtemp(dir=directory))
    settings = {"steps": STEPS, "resume": "never", "dir": run / "run"}
    words = [word for name, value in settings.items() for word in (f"--run.{name}", str(value))]
    if code := train(num_ranks, ["--config", str(config), *words]):
        raise UserError(f"the run on {num_ranks} ranks ended with exit code {code}: its errors are above")
    summary = json.loads((run / "run" / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "start_s": summary["start_s"],
        "host_bytes": steps[-1]["peak_host_bytes"],
        "losses": [step["loss"] for step in steps if "loss" in step],
    }


def _check_losses(starts: Sequence[Mapping[str, Any]]) -> None:
    expected = starts[0]["losses"]
    for start in starts[1:]:
        for step, (a, b) in enumerate(zip(start["losses"], expected, strict=True), 1):
            if None in (a, b) or not math.isclose(a, b, rel_tol=TOLERANCE):
                raise UserError(
                    f"expected the losses of the run on {starts[0]['ranks']} ranks, got {a} instead of {b} in "
                    f"step {step} on {start['ranks']} ranks: compare the runs with run.exact, which rules out rounding"
                )


def _predict(starts: Sequence[Mapping[str, Any]], cores: int) -> dict[str, float]:
    """Return the predicted seconds of each phase on `MANY_RANKS` ranks with one core each, and their sum as `total`."""
    ranks = np.array([start["ranks"] for start in starts], dtype=float)
    predicted = {}
    for phase in starts[0]["start_s"]:
        seconds = np.array([start["start_s"][phase] for start in starts]) * np.minimum(1.0, cores / ranks)
        slope, intercept = np.polyfit(ranks, seconds, 1)
        grows = phase in COMMUNICATING and slope > 0
        predicted[phase] = float(intercept + MANY_RANKS * slope) if grows else float(np.median(seconds))
    return predicted | {"total": sum(value for phase, value in predicted.items() if phase != "total")}
