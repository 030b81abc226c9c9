"""Time torch's fused AdamW beside its default on slices as ranks have them, to decide what optim.fused auto means.

    OMP_NUM_THREADS=1 python benchmarks/fused_optimizer.py [--numel 9000000] [--slices 60] [--device cpu]

On an idle machine, with as many threads as a rank has. Prints seconds of a step for each kind, of the rounds the
fastest, and by how much the parameters differ. Local.
"""

import argparse
import time
from collections.abc import Callable

import torch

from odc_mpi.shard.optim import build_optimizer


def main() -> None:
    """Time both kinds in turn and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=9_000_000, help="elements of all slices")
    parser.add_argument("--slices", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    made = {fused: _make(arguments, fused) for fused in (False, True)}
    best = dict.fromkeys(made, float("inf"))
    for _ in range(arguments.rounds):
        for fused, (_, step) in made.items():
            best[fused] = min(best[fused], step())
    for fused, seconds in best.items():
        print(f"{'fused' if fused else 'default':8} {1e3 * seconds:8.2f} ms a step")
    pairs = zip(made[False][0], made[True][0], strict=True)
    print(f"largest difference of a parameter: {max(float((a - b).abs().max()) for a, b in pairs):.2e}")


def _make(arguments: argparse.Namespace, fused: bool) -> tuple[list[torch.Tensor], Callable[[], float]]:
    """Return parameters, and a function that steps and returns the seconds."""
    generator = torch.Generator().manual_seed(0)
    names = [f"slice{i}" for i in range(arguments.slices)]
    size = arguments.numel // arguments.slices
    named = [(n, torch.nn.Parameter(torch.randn(size, generator=generator).to(arguments.device))) for n in names]
    for _, parameter in named:
        parameter.grad = torch.randn(size, generator=generator).to(arguments.device)
    shapes = dict.fromkeys(names, (size, 1))
    optimizer = build_optimizer("adamw", named, shapes, weight_decay=0.1, fused=fused, lr=1e-4)

    def step() -> float:
        begin = time.perf_counter()
        optimizer.step()
        if arguments.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    step()
    return [parameter.detach() for _, parameter in named], step


if __name__ == "__main__":
    main()
