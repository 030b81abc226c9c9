"""Compare the speed of training on two hosts and on one, and count the bytes on the network. Requires root.

    python benchmarks/network_speed.py                                # the quick start's model, ten minutes
    python benchmarks/network_speed.py --link "netem rate 1gbit delay 500us"
    python benchmarks/network_speed.py --larger                       # a Llama of 9 million parameters
    python benchmarks/network_speed.py --cache-bytes 2M               # also with this size of each of the two caches
    python benchmarks/network_speed.py --islands --ranks-per-host 2 --link "tbf rate 100mbit burst 128kb latency 400ms"
    python benchmarks/network_speed.py --larger --bases --link "tbf rate 1gbit burst 128kb latency 100ms"
    python benchmarks/network_speed.py --outer e3m0 --steps 30 --link "tbf rate 10mbit burst 70kb latency 400ms"

Jobs with one rank on each of two hosts alternate with jobs with two ranks on one host. Each job compares in rounds, on
the same minibatches: plain torch in processes that exchange nothing (`ceiling`), odc_mpi with the default sizes of
`comm.parameter_cache_bytes` and `comm.gradient_cache_bytes`, with `lb_mini` and with `dynamic`, and odc_mpi without
caches. With `--islands`, only jobs on two hosts compare `ceiling`, the default and one island per host; with `--outer`,
these islands train separately, and synchronize every 30 steps. With `--bases`, adapters train over a base in bf16 and
in 4 bits, which is divided among all ranks (`world`) or those of each host (`node`). Each training is created from
scratch, so that no thread of one takes time from another. Speeds are multiples of `ceiling` in the same round, so
variations of the machine's speed affect both. Bytes are those of parameters and gradients per rank, and all that rank
0's host received over Ethernet.

Each MPI library has its own environment: run the script with the python of each. `--link` is the argument of `tc qdisc
add dev eth0 root`, applied to both ends of the link, so that a round trip takes twice its delay. A kernel without netem
can only limit the rate: "tbf rate 1gbit burst 128kb latency 100ms".
"""

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "hosts"), str(TESTS / "launch")]
import mpi_launch  # noqa: E402
from machine import LINK  # noqa: E402
from two_hosts import launch, missing  # noqa: E402

DATA = mpi_launch.ROOT / "runs/data/stdlib.h5"
CEILING, CACHES, NO_CACHES, DYNAMIC = "ceiling", "caches", "no caches", "caches, dynamic"
ISLANDS, OUTER = "islands", "merged islands"
LARGER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
#: Steps of each training that are not counted.
WARM_UP = 2


def configuration(arguments):
    """Return the configuration: settings of the quick start, with the requested number of steps."""
    from odc_mpi.training.settings import load
    from odc_mpi.training.start.resolved_settings import with_device

    config = with_device(load(mpi_launch.ROOT / "jobs/quickstart.yaml"), "cpu")
    model = config.model.config | (LARGER if arguments.larger else {})
    data = replace(config.data, path=str(DATA), minibatch_sequences=arguments.sequences, balance="lb_mini")
    return replace(
        config,
        model=replace(config.model, config=model),
        data=data,
        optim=replace(config.optim, lr_scheduler_type="constant", warmup_steps=0),
    )


def caches(config, size):
    """Return the configuration with the given size of each of the two caches."""
    from odc_mpi.setting_types import Size

    each = Size(size)
    return replace(config, comm=replace(config.comm, parameter_cache_bytes=each, gradient_cache_bytes=each))


def adapters(config):
    """Yield names and configurations of adapters over bases in bf16 and in 4 bits, over all ranks and on each node."""
    config = replace(config, lora=replace(config.lora, r=8))
    for name, in_4_bits in (("bf16", False), ("4 bits", True)):
        model = replace(config.model, param_dtype="bfloat16", load_in_4bit=in_4_bits)
        for scope in ("world", "node"):
            yield f"{name}, {scope}", replace(config, model=model, comm=replace(config.comm, frozen_scope=scope))


def train(world, name, config, steps):
    """Train from scratch.

    Returns tokens per second; per step bytes of a rank, bytes of a host and microbatches; and the percentage of the
    time that merges of islands take without their waits.
    """
    from baselines import UnshardedBaseline
    from measure import slowest_s

    from odc_mpi.comm.islands.islands import Islands
    from odc_mpi.data.loader import Part
    from odc_mpi.training.context import RunContext
    from odc_mpi.training.inputs import open_inputs
    from odc_mpi.training.islands.apart import add_diloco
    from odc_mpi.training.run import build_trainer, decide

    context, num_runs, closing = RunContext(config, world, decision=decide(config, world)), 1, ExitStack()
    if config.islands.by != "off":
        islands = Islands(world, config.islands.by)
        context.islands = islands
        if config.islands.mode == "outer":
            closing.callback(islands.close)
            context.world, context.islands, num_runs = islands.island, None, islands.size
            context.part = Part(islands.index, islands.size)
            context.add_callbacks = lambda trainer: closing.callback(add_diloco(context, islands, trainer).free)
    context.inputs = open_inputs(config, context.world.rank, context.world.size, context.part)
    output = []
    if name == CEILING:
        whole = UnshardedBaseline(config, context.inputs.sequence_loader)
        step = lambda: {"num_input_tokens": whole.step()[1]}  # noqa: E731
    else:
        trainer = build_trainer(context)
        step = trainer.step
        closing.callback(trainer.model.close)
    for _ in range(WARM_UP):
        step()
    before = received()
    seconds = slowest_s(world, name, lambda: output.extend(step() for _ in range(steps)))
    on_wire = (received() - before) / steps
    outer_s = 0.0 if name == CEILING else trainer.model.spans.seconds["outer_sync"]
    outer_s -= sum(line.get("island_wait_s", 0) for line in output) if outer_s else 0
    closing.close()
    kinds = ["bytes_fetched_other_nodes", "bytes_pushed_other_nodes"]
    kinds += ["bytes_between_islands"] if config.islands.mode == "outer" else []
    over = [sum(line.get(kind, 0) for kind in kinds) for line in output]
    microbatches = [(line.get("microbatches_min", 0) + line.get("microbatches_max", 0)) / 2 for line in output]
    tokens = world.gather_objects(sum(line["num_input_tokens"] for line in output))
    speed = sum(tokens) * num_runs / len(tokens) / seconds
    return speed, statistics.mean(over), on_wire, statistics.mean(microbatches), 100 * outer_s / seconds


def received():
    """Return the bytes that this host has received over Ethernet; 0 without such a device."""
    counter = Path("/sys/class/net/eth0/statistics/rx_bytes")
    return int(counter.read_text()) if counter.exists() else 0


def job(arguments):
    """Run as a rank: train all variants in rounds; rank 0 prints the figures of each as JSON."""
    import torch
    from measure import interleaved

    from odc_mpi.formatting import parse_size
    from odc_mpi.runtime.world import World

    with World(timeout_s=arguments.timeout_s) as world:
        config = configuration(arguments)
        torch.set_num_threads(1)
        dynamic = replace(config, data=replace(config.data, balance="dynamic"))
        ways = {CEILING: config, NO_CACHES: caches(config, 0), CACHES: config, DYNAMIC: dynamic}
        if arguments.outer:
            outer = replace(config.islands, by="node", mode="outer", wire=arguments.outer)
            ways = {CEILING: config, CACHES: config, OUTER: replace(config, islands=outer)}
        if arguments.islands:
            islands = replace(config, islands=replace(config.islands, by="node"))
            ways = {CEILING: config, CACHES: config, ISLANDS: islands}
        if arguments.bases:
            ways = {CEILING: config, **dict(adapters(config))}
        if arguments.cache_bytes:
            ways[f"{arguments.cache_bytes} each"] = caches(config, parse_size(arguments.cache_bytes))
        runs = {name: partial(train, world, name, settings, arguments.steps) for name, settings in ways.items()}
        results = interleaved(runs, arguments.rounds)
        if world.rank == 0:
            print(json.dumps(results), flush=True)


def run(hosts, arguments):
    """Launch a job; return the figures of each variant in each of its rounds."""
    command = [__file__, "--job", "--steps", arguments.steps, "--sequences", arguments.sequences]
    command += ["--rounds", arguments.rounds, "--timeout-s", arguments.timeout_s]
    command += ["--larger"] if arguments.larger else []
    command += ["--cache-bytes", arguments.cache_bytes] if arguments.cache_bytes else []
    command += ["--islands"] if arguments.islands else []
    command += ["--bases"] if arguments.bases else []
    command += ["--outer", arguments.outer] if arguments.outer else []
    if hosts == 1:
        done = mpi_launch.finish(mpi_launch.start(2, *command), arguments.timeout_s)
    else:
        ranks = arguments.ranks_per_host
        done = launch(ranks, *command, timeout_s=arguments.timeout_s, **{LINK: arguments.link})
    if done.code:
        raise SystemExit(f"a job on {hosts} hosts ended with {done.code}:\n{done.out}\n{done.err}")
    return json.loads(done.out.splitlines()[-1])


def main():
    """Run the jobs and print the speeds as multiples of `ceiling`."""
    parser = argparse.ArgumentParser(description="Compare training on one host and on two hosts.")
    parser.add_argument("--jobs", type=int, default=2, help="number of jobs on one host, and as many on two")
    parser.add_argument("--rounds", type=int, default=5, help="of each job")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of each training")
    parser.add_argument("--sequences", type=int, default=64, help="of a minibatch")
    parser.add_argument("--link", default="", metavar="QDISC", help='such as "netem rate 1gbit delay 500us"')
    parser.add_argument("--larger", action="store_true", help="a Llama of 9 million parameters")
    parser.add_argument(
        "--cache-bytes", default="", metavar="SIZE", help="size of each of the two caches, as a further variant"
    )
    parser.add_argument("--islands", action="store_true", help="compare one island per host with the default")
    parser.add_argument("--bases", action="store_true", help="compare adapters over bases in bf16 and in 4 bits")
    parser.add_argument("--outer", default="", metavar="WIRE", help="compare separate islands with the default")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="of the jobs on two hosts")
    parser.add_argument("--timeout-s", type=float, default=900, help="of a job")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job(arguments)
        return
    reason = missing()
    if reason is not None:
        parser.error(reason)
    if not DATA.exists():
        command = [sys.executable, "-m", "odc_mpi", "prepare", "stdlib", "--out", DATA, "--max-length", "1024"]
        subprocess.run(command, check=True)
    results = {}
    for _ in range(arguments.jobs):
        for hosts in (2,) if arguments.islands or arguments.outer else (2, 1):
            for name, done in run(hosts, arguments).items():
                results.setdefault((hosts, name), []).extend(done)
    head = f"{'hosts':5} {'':16}{'tokens/s':>10}  {'ratio':>8}  {'quartiles':>14}"
    print(f"{head}  {'MB of a rank':>12}  {'MB of a host':>12}  microbatches  merges")
    for (hosts, name), done in results.items():
        ratios = [speed / ceiling for (speed, *_), (ceiling, *_) in zip(done, results[hosts, CEILING], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        speed, over, on_wire, microbatches, outer = (statistics.median(values) for values in zip(*done, strict=True))
        figures = f"{speed:10,.0f}  {middle:8.3f}  {f'{low:.3f} to {high:.3f}':>14}"
        figures += f"  {over / 1e6:12.4f}  {on_wire / 1e6:12.4f}  {microbatches:12.1f}  {outer:9.2f}%"
        print(f"{hosts:5} {name:16}{figures}")


if __name__ == "__main__":
    main()
