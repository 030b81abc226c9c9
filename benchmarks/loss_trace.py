"""Loss and gradient norm of every step, in full precision, to compare two checkouts.

    python benchmarks/loss_trace.py OUT.json [--ranks N]       with the Python of a checkout's environment
    python benchmarks/loss_trace.py --compare A.json B.json    exit code 1 if they differ

It trains a small model through the command line of the odc_mpi that this Python imports: from the start, from a
checkpoint, and with many settings changed. On one rank both checkouts must compute the same bits; on several ranks
gradients are summed in any order, and the comparison allows 1e-6 of each value. Both traces must be recorded on the
same machine with the same libraries: other processors and other versions of torch sum in another order.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

TOLERANCE = 1e-6  # relative, on several ranks
DEADLINE_S = 300

CONFIG = """
model:
  config: {model_type: qwen2, vocab_size: 288, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,
           num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 128, tie_word_embeddings: true}
data: {path: data.h5, minibatch_sequences: 12, max_tokens_per_microbatch: 128}
optim: {learning_rate: 0.01, weight_decay: 0.01, warmup_steps: 2}
run: {dir: run, steps: 10, checkpoint_every: 5, seed: 7, threads: 1}
"""
#: Arguments by name. The second run resumes from the first.
RUNS = {
    "start": ("--run.steps", "7"),
    "resumed": ("--run.resume", "auto"),
    "otherwise": (
        *("--run.dir", "other", "--run.seed", "11", "--model.config.tie_word_embeddings", "false"),
        *("--model.gradient_checkpointing", "true", "--data.cost", "linear", "--comm.prefetch", "0"),
        *("--optim.optimizer", "sgd", "--optim.momentum", "0.9", "--optim.learning_rate", "0.1"),
        *("--optim.lr_scheduler_type", "cosine", "--run.checkpoint_every", "0"),
    ),
}


def main():
    """Write a trace, or compare two; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.json", help="where to write the trace")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks, under mpiexec if several")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.compare is None):
        parser.error("expected either OUT.json or --compare A.json B.json")
    if arguments.compare:
        return compare(*(json.loads(path.read_text()) for path in arguments.compare))
    print(f"odc_mpi of {Path(find_spec('odc_mpi').origin).parent}", flush=True)
    content = {"ranks": arguments.ranks, "runs": trace(arguments.ranks)}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{arguments.out}: {sum(map(len, content['runs'].values()))} steps on {arguments.ranks} ranks")
    return 0


def trace(ranks):
    """Train; return step, loss and gradient norm of each step, by run."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks > 1 else []
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        text = "".join(json.dumps({"text": f"{'la ' * (i % 9)}{i}"}) + "\n" for i in range(40))
        Path(folder, "text.jsonl").write_text(text)
        Path(folder, "config.yaml").write_text(CONFIG)
        call(folder, ["prepare", "text.jsonl", "--out", "data.h5", "--vocab-size", "288"])
        for name, changes in RUNS.items():
            call(folder, ["train", "--config", "config.yaml", *changes], launcher)
            lines = Path(folder, "other" if name == "otherwise" else "run", "metrics.jsonl").read_text().splitlines()
            steps = [json.loads(line) for line in lines]
            found[name] = [[step["step"], step["loss"], step["grad_norm"]] for step in steps]
    return found


def call(folder, arguments, launcher=()):
    """Run a command of odc_mpi to its end."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ODC_MPI_PROGRESS": "plain"}
    command = [*launcher, sys.executable, "-m", "odc_mpi", *arguments]
    subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=True)


def compare(first, second):
    """Print the differences of two traces; return the exit code."""
    ranks = max(first["ranks"], second["ranks"])
    differing = [] if first["runs"].keys() == second["runs"].keys() else ["other runs"]
    for name in first["runs"].keys() & second["runs"].keys():
        steps, others = first["runs"][name], second["runs"][name]
        if len(steps) != len(others) or not all(map(same, steps, others, [ranks] * len(steps))):
            differing += [f"{name}: {step} and {other}" for step, other in zip(steps, others, strict=False)]
    print("\n".join(differing) or f"the same {'to the last bit' if ranks == 1 else f'within {TOLERANCE:g}'}")
    return 1 if differing else 0


def same(step, other, ranks):
    """Return True if two steps agree within the tolerance."""
    if ranks == 1 or None in (*step, *other):
        return step == other
    return all(math.isclose(value, another, rel_tol=TOLERANCE) for value, another in zip(step, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
