"""What training computes, to the last bit: to compare two checkouts with each other, or a checkout with itself.

    python trace_of_run.py OUT.json [--ranks N]       with the Python of a checkout's environment
    python trace_of_run.py --compare A.json B.json    exit code 1 if they differ

It trains what is kept beside it, three times and only through the command line of the odc_mpi which that Python finds:
from the start, from the kept checkpoint, and from the start with nearly all settings otherwise. Loss and norm of the
gradient of every step are written as JSON has them, which is exact. On one rank they have to be the same to the last
bit; on several gradients are added in any order, and the comparison allows 1e-6 of each value.

Both traces have to be made on the same machine, with the same libraries: other processors and other versions of torch
multiply in another order. What they were made with is in the file, and the comparison tells where it is not the same.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-6  # relative, on several ranks
DEADLINE_S = 300

#: By name: what of the kept files a run begins with besides the data, and its arguments.
RUNS = {
    "start": ((), ("--config", "run.yaml")),
    "resumed": (("run",), ("--config", "run/config.yaml")),
    "otherwise": (
        (),
        (
            *("--config", "run.yaml", "--run.seed", "11", "--model.config.tie_word_embeddings", "false"),
            *("--model.gradient_checkpointing", "true", "--model.reduce_dtype", "float64"),
            *("--data.balance", "local_sort", "--data.cost", "quadratic", "--data.cost_quadratic", "0.01"),
            *("--comm.zero_copy", "off", "--comm.prefetch", "0"),
            *("--optim.optimizer", "sgd", "--optim.momentum", "0.9", "--optim.learning_rate", "0.1"),
            *("--optim.lr_scheduler_type", "cosine", "--run.checkpoint_every", "0"),
        ),
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT.json", help="where to write the trace")
    parser.add_argument("--ranks", type=int, default=1, help="under mpiexec if there are several")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    arguments = parser.parse_args()
    if (arguments.out is None) == (arguments.compare is None):
        parser.error("expected either OUT.json or --compare A.json B.json")
    if arguments.compare:
        return compare(*(json.loads(path.read_text()) for path in arguments.compare))
    print(f"odc_mpi of {Path(find_spec('odc_mpi').origin).parent}", flush=True)
    content = trace(arguments.ranks)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{arguments.out}: {sum(map(len, content['runs'].values()))} steps on {arguments.ranks} ranks")
    return 0


def trace(ranks):
    about = {name: version(name) for name in ("torch", "transformers", "numpy")} | {"machine": platform.machine()}
    return {"ranks": ranks, "about": about, "runs": {name: steps_of(name, ranks) for name in RUNS}}


def steps_of(name, ranks):
    """Train in a folder of its own; return step, loss and norm of the gradient of all steps that it did."""
    kept, arguments = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / "run.yaml", folder)
        for part in ("data", *kept):
            shutil.copytree(HERE / part, Path(folder, part))
        # On one rank without mpiexec, which is not everywhere.
        launcher = [mpiexec(), "-n", str(ranks)] if ranks > 1 else []
        command = [*launcher, sys.executable, "-m", "odc_mpi", "train", *arguments]
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            try:
                code = process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = f"none within {DEADLINE_S} s"
            finally:
                end(process)
            output.seek(0)
            text = output.read()
        lines = Path(folder, "run", "metrics.jsonl")
        if code or not lines.exists():
            raise SystemExit(f"{name}: exit code {code} of {' '.join(command)}\n{text}")
        if kept and "resuming after step" not in text:
            raise SystemExit(f"{name}: expected it to go on from the kept checkpoint\n{text}")
        steps = [json.loads(line) for line in lines.read_text().splitlines()]
    return [[step["step"], step["loss"], step["grad_norm"]] for step in steps]


def end(process):
    """End a launch that takes too long; a launcher ends its ranks when asked to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def mpiexec():
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise SystemExit("expected mpiexec beside Python or on the PATH, got none")
    return found


def environment():
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ODC_MPI_PROGRESS": "plain",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_osc": "^ucx",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


def compare(first, second):
    """Say where two traces differ; return the exit code."""
    if first["about"] != second["about"]:
        print(f"made with others: {first['about']} and {second['about']}")
    ranks = max(first["ranks"], second["ranks"])
    tolerance = 0.0 if ranks == 1 else TOLERANCE
    names = sorted(first["runs"].keys() | second["runs"].keys())
    differing = [line for name in names for line in differences(name, first, second, tolerance)]
    print("\n".join(differing) or f"the same {'to the last bit' if ranks == 1 else f'within {TOLERANCE:g}'}")
    return 1 if differing else 0


def differences(name, first, second, tolerance):
    steps, others = (content["runs"].get(name, []) for content in (first, second))
    if len(steps) != len(others):
        yield f"{name}: {len(steps)} and {len(others)} steps"
    for (step, *values), (other_step, *other_values) in zip(steps, others, strict=False):
        if step != other_step:
            yield f"{name}: step {step} and step {other_step}"
        for what, value, other in zip(("loss", "norm of the gradient"), values, other_values, strict=True):
            # repr: exact, and null is the same as null alone.
            same = repr(value) == repr(other)
            if not same and tolerance and None not in (value, other):
                same = math.isclose(value, other, rel_tol=tolerance)
            if not same:
                yield f"{name}, step {step}: {what} {value!r} and {other!r}"


if __name__ == "__main__":
    sys.exit(main())
