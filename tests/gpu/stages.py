"""The tests and figures that need a GPU, in stages: `make test-gpu`, or a few at a time on a machine lent for minutes.

    python tests/gpu/stages.py --mpi mpich --mpiexec .venv/bin/mpiexec --logs runs/gpu [STAGE ...]

Each stage prints as it goes, keeps what it printed in LOGS/STAGE.log, and ends within eight minutes. A stage that fails
does not end the others. The exit code is 1 if a stage failed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
STAGE_S = 480.0
#: Only our own warnings are errors: a machine with a GPU has libraries of its own choice.
PYTEST = (sys.executable, "-m", "pytest", "--color=no", "-o", "filterwarnings=default", "--timeout=240")
SANITIZER = os.environ.get("SANITIZER", "compute-sanitizer")
ODC_MPI = Path(sys.executable).with_name("odc-mpi")
RANKS = (1, 2, 4)
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "ODC_MPI_REQUIRE_GPU": "1"}
#: Why a stage was left out.
Skipped = str


class Job(NamedTuple):
    """Settings shared by the commands of a stage: the launcher, the log, the end by `time.monotonic`, and variables."""

    mpiexec: Sequence[str]
    log: Path
    until: float
    environment: dict[str, str]

    def call(self, *words: object, **environment: str) -> tuple[int, str]:
        """Run a command, print and keep what it prints; return its exit code, 124 beyond the time, and its output."""
        command, variables, output = [str(word) for word in words], self.environment | environment, []
        head = [f"$ {' '.join([*(f'{name}={value}' for name, value in variables.items()), *command])}\n"]
        limit = ["timeout", "--kill-after=5", f"{max(1.0, self.until - time.monotonic()):.0f}"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        settings = {"text": True, "errors": "replace", "cwd": ROOT, "env": os.environ | SETTINGS | variables}
        process = subprocess.Popen([*limit, *command], **streams, **settings)
        with process, self.log.open("a") as log:
            for line in chain(head, process.stdout):
                print(line, end="", flush=True)
                log.write(line)
                log.flush()
                output.append(line)
        return process.returncode, "".join(output[1:])

    def launch(self, ranks: int, *words: object, **environment: str) -> tuple[int, str]:
        """Run a command under mpiexec, as `call` does."""
        return self.call(*self.mpiexec, "-n", ranks, *words, **environment)


def serial(job: Job, *tests: str) -> int | Skipped:
    """Run tests of one process."""
    return job.call(*PYTEST, *tests)[0]


def sanitizer(job: Job, tool: str) -> int | Skipped:
    """Run the kernels under one of NVIDIA's tools.

    torch takes every piece of memory from the driver, else what is beyond one is torch's all the same. Calls of the
    driver that fail are left to torch and CuPy: both try some that may fail. Left out: tests that check
    whether the host waits, as it does under the tool.
    """
    if shutil.which(SANITIZER) is None:
        return f"no {SANITIZER} on the PATH"
    ours = ("--kernel-name", "kernel_substring=add_segments", "--kernel-name", "kernel_substring=flatten")
    options = ("--tool", tool, "--error-exitcode", "1", *(("--report-api-errors", "no") if tool == "memcheck" else ()))
    tests = ("tests/comm/kernels/test_kernels.py", "-k", "(gpu or subnormal) and not takes_its_turn")
    return job.call(SANITIZER, *options, *ours, *PYTEST, *tests, PYTORCH_NO_CUDA_MEMORY_CACHING="1")[0]


def training(job: Job, ranks: int, chosen: str) -> int | Skipped:
    """Run tests of training."""
    arguments = ("--capture=sys", "--with-mpi", "--only-mpi", "tests/mpi/device/test_gpu.py", "-k", chosen)
    return job.launch(ranks, *PYTEST, *arguments)[0]


def doctor(job: Job, ranks: int) -> int | Skipped:
    """Ask the doctor, which keeps what it has proved for the runs that follow; its object is a figure."""
    code, output = job.launch(ranks, ODC_MPI, "doctor", "--json")
    # With an answer the doctor has done its work: Open MPI's launcher fails all the same where an operation crashed.
    return 0 if _keep_object(job, output) else code or 1


def bench(job: Job, part: str) -> int | Skipped:
    """Measure; the object is a figure."""
    ranks, options = BENCHES[part]
    script, parts = ("gpu_models.py", ()) if part == "models" else ("gpu.py", ("--parts", part))
    code, output = job.launch(ranks, sys.executable, f"benchmarks/{script}", *parts, *options)
    _keep_object(job, output)
    return code


def _keep_object(job: Job, output: str) -> bool:
    """Write what a command printed with --json beside its log, if there is such an object; return whether there is."""
    found = [line for line in output.splitlines() if line.startswith("{")]
    if found:
        job.log.with_suffix(".json").write_text(json.dumps(json.loads(found[-1]), indent=1))
    return bool(found)


#: Ranks and options, by part of `benchmarks/gpu.py`; `models` is `benchmarks/gpu_models.py`.
BENCHES: dict[str, tuple[int, tuple[object, ...]]] = {
    "bandwidths": (2, ()),
    "kernels": (2, ()),
    "step": (1, ("--steps", 2, "--repeats", 3)),
    "ranks": (2, ("--steps", 2, "--repeats", 2, "--contenders", "host_windows", "device_windows")),
    "models": (1, ()),
}
#: Tests of training with windows on the host.
STAGED = "not windows_on_the_gpu and not split"
STAGES: dict[str, Callable[[Job], int | Skipped]] = {
    "kernels": lambda job: serial(job, "tests/comm/kernels"),
    "attention": lambda job: serial(job, "tests/models/packed/test_varlen_gpu.py", "tests/training/test_losses_gpu.py"),
    "memcheck": partial(sanitizer, tool="memcheck"),
    "racecheck": partial(sanitizer, tool="racecheck"),
    **{f"doctor-{n}": partial(doctor, ranks=n) for n in RANKS},
    **{f"staged-{n}": partial(training, ranks=n, chosen=STAGED) for n in RANKS},
    **{f"split-{n}": partial(training, ranks=n, chosen="split") for n in RANKS if n > 1},
    **{f"windows-{n}": partial(training, ranks=n, chosen="windows_on_the_gpu") for n in RANKS},
    **{f"doctor-ucx-{n}": partial(doctor, ranks=n) for n in RANKS},
    **{f"windows-ucx-{n}": partial(training, ranks=n, chosen="windows_on_the_gpu") for n in RANKS},
    **{f"bench-{part}": partial(bench, part=part) for part in BENCHES},
}


def ucx_environment(mpi: str) -> dict[str, str]:
    """Return the environment for an MPI of the registry with the UCX of `libucx-cu12` or `libucx-cu13`."""
    found = importlib.util.find_spec("libucx")
    if found is None or found.origin is None:
        return {}
    folder = str(Path(found.origin).parent / "lib")
    before = os.environ.get("LD_LIBRARY_PATH")
    any_device = {f"OMPI_MCA_opal_common_ucx_{each}": "any" for each in ("tls", "devices")}
    by_library = {
        "openmpi": {"OMPI_MCA_pml": "ucx", "OMPI_MCA_osc": "ucx", **any_device},
        "mpich": {"MPIR_CVAR_CH4_NETMOD": "ucx", "MPIR_CVAR_NOLOCAL": "1"},
    }
    # Without NVLink between GPUs UCX leaves reading by CUDA IPC out, and a Get waits for its target.
    common = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}
    return by_library.get(mpi, {}) | common


def run(name: str, mpi: str, mpiexec: Sequence[str], logs: Path) -> str:
    """Run a stage; return how it ended, in a word or a sentence."""
    environment = {}
    if "-ucx-" in name:
        environment = ucx_environment(mpi)
        if not environment:
            return "left out: libucx-cu12 or libucx-cu13 is not installed"
    log = logs / f"{name}.log"
    log.unlink(missing_ok=True)
    code = STAGES[name](Job(mpiexec, log, time.monotonic() + STAGE_S, environment))
    if isinstance(code, str):
        return f"left out: {code}"
    return {0: "passed", 124: "ran out of time", 137: "ran out of time"}.get(code, f"failed: exit code {code}")


def main() -> int:
    """Run stages and print how each ended; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=["mpich", "openmpi", "system"], default="mpich")
    parser.add_argument("--mpiexec", default="mpiexec", help="the launcher, with arguments of its own")
    parser.add_argument("--logs", type=Path, default=Path("runs/gpu"))
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"by default all: {', '.join(STAGES)}")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {unknown[0]}: expected some of {', '.join(STAGES)}")
    arguments.logs.mkdir(parents=True, exist_ok=True)
    endings = {}
    for name in arguments.stages or STAGES:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        endings[name] = run(name, arguments.mpi, arguments.mpiexec.split(), arguments.logs.resolve())
        print(f"== {name}: {endings[name]} ({time.monotonic() - began:.0f} s)", flush=True)
    print(*(f"{name:18} {ending}" for name, ending in endings.items()), sep="\n")
    return int(any(ending.startswith(("failed", "ran out")) for ending in endings.values()))


if __name__ == "__main__":
    sys.exit(main())
