"""How fast two hosts train beside one, and what crosses the network between them. For a person, as root.

    python tests/hosts/network_speed.py                                # the quick start's model, ten minutes
    python tests/hosts/network_speed.py --link "netem rate 1gbit delay 500us"
    python tests/hosts/network_speed.py --larger                       # a Llama of 9 million parameters
    python tests/hosts/network_speed.py --cache-bytes 2M               # also with so much for each of the two caches

One rank on each of two hosts beside two ranks on one host, one training run after the other, in rounds. Two hosts with
the caches of `comm.parameter_cache_bytes` and `comm.gradient_cache_bytes` as they are by default, and without. Each
library has its own environment: run it with the python of each. `--link` is what `tc qdisc add dev eth0 root` takes,
and holds for either end of the link, so that a round trip takes twice its delay. A kernel without netem limits the rate
alone: "tbf rate 1gbit burst 128kb latency 100ms".
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "launch")]
import mpi_launch  # noqa: E402
from machine import LINK  # noqa: E402
from two_hosts import launch, missing  # noqa: E402

DATA = mpi_launch.ROOT / "runs/data/stdlib.h5"


def both(size):
    """Settings that give each of the two caches so much."""
    return (f"--comm.parameter_cache_bytes={size}", f"--comm.gradient_cache_bytes={size}")


#: By name: on how many hosts, and settings.
CONTENDERS = {"one host": (1, ()), "two hosts, no caches": (2, both(0)), "two hosts": (2, ())}
LARGER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
#: Steps that do not count, of each run.
WARM_UP = 4


def train(hosts, settings, arguments):
    """Train once; return tokens per second, and per minibatch and rank bytes over the network, and microbatches."""
    with tempfile.TemporaryDirectory(prefix="odc_mpi-network-") as folder:
        command = [
            "-m",
            "odc_mpi",
            "train",
            "--config",
            mpi_launch.ROOT / "jobs/quickstart.yaml",
            f"--run.dir={folder}/run",
        ]
        command += [f"--data.path={DATA}", "--run.checkpoint_every=0", f"--run.steps={WARM_UP + arguments.steps}"]
        command += [f"--data.minibatch_sequences={arguments.sequences}", "--run.trace_steps=0", *settings]
        command += [f"--model.config.{key}={value}" for key, value in (LARGER if arguments.larger else {}).items()]
        if hosts == 1:
            done = mpi_launch.finish(mpi_launch.start(2, *command), arguments.timeout_s)
        else:
            done = launch(1, *command, timeout_s=arguments.timeout_s, **{LINK: arguments.link})
        if done.code:
            raise SystemExit(f"a run on {hosts} hosts ended with {done.code}:\n{done.out}\n{done.err}")
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()][WARM_UP:]
    speed = sum(line["num_input_tokens"] for line in lines) / sum(line["step_s"] for line in lines)
    over = statistics.mean(line["bytes_fetched_other_nodes"] + line["bytes_pushed_other_nodes"] for line in lines)
    microbatches = statistics.mean((line["microbatches_min"] + line["microbatches_max"]) / 2 for line in lines)
    return speed, over, microbatches


def main():
    parser = argparse.ArgumentParser(description="Train on one host and on two, and compare.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16, help="that count, of each run")
    parser.add_argument("--sequences", type=int, default=64, help="of a minibatch")
    parser.add_argument("--link", default="", metavar="QDISC", help='such as "netem rate 1gbit delay 500us"')
    parser.add_argument("--larger", action="store_true", help="a Llama of 9 million parameters")
    parser.add_argument("--cache-bytes", default="", metavar="SIZE", help="also so much for each of the caches")
    parser.add_argument("--timeout-s", type=float, default=300)
    arguments = parser.parse_args()
    contenders = CONTENDERS | (
        {f"two hosts, {arguments.cache_bytes} each": (2, both(arguments.cache_bytes))} if arguments.cache_bytes else {}
    )
    reason = missing()
    if reason is not None:
        parser.error(reason)
    if not DATA.exists():
        subprocess.run([sys.executable, "-m", "odc_mpi", "prepare", "stdlib", DATA, "--max-length", "1024"], check=True)
    results = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(arguments.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            results[name].append(train(*contenders[name], arguments))
            speed, over, _ = results[name][-1]
            print(f"round {turn + 1}: {name}: {speed:,.0f} tokens/s, {over / 1e6:.2f} MB", file=sys.stderr, flush=True)
    print(f"{'':22}{'tokens/s':>10}  {'of one host':>12}  {'quartiles':>12}  {'MB over the network':>20}  microbatches")
    for name, done in results.items():
        ratios = [speed / one for (speed, *_), (one, *_) in zip(done, results["one host"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        speed, over, microbatches = (statistics.median(values) for values in zip(*done, strict=True))
        quartiles = f"{low:.2f} to {high:.2f}"
        figures = f"{speed:10,.0f}  {middle:12.3f}  {quartiles:>12}  {over / 1e6:20.2f}  {microbatches:12.1f}"
        print(f"{name:22}{figures}")


if __name__ == "__main__":
    main()
