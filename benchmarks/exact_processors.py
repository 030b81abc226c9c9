"""Compare the bits of a short exact run under settings by which the libraries below torch take other instructions.

    python benchmarks/exact_processors.py [--steps 5] [--under COMMAND ...]

Trains two layers of the model of `odc-mpi bench train` on four sequences a step, from the same start, in a process of
its own for each setting, in fp32 and in bf16, on one thread and on two. Prints for each setting and type the first
digits of the parameters' digest, and the time of the shortest step. `--under` names what to start Python with, such as
an emulator of another processor; `--settings` some of the settings. Local.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

#: Environment variables of each setting: of MKL, of oneDNN, of torch itself.
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    **{f"MKL_CBWR={value}": {"MKL_CBWR": value} for value in ("COMPATIBLE", "AVX2", "AVX512")},
    **{
        f"ONEDNN_MAX_CPU_ISA={value}": {"ONEDNN_MAX_CPU_ISA": value}
        for value in ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16")
    },
    **{f"ATEN_CPU_CAPABILITY={value}": {"ATEN_CPU_CAPABILITY": value} for value in ("default", "avx2", "avx512")},
    "all AVX2": {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "COMPATIBLE, AVX2": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "all lowest": {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}


def main() -> None:
    """Train under each setting, and print a line for each. Local."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS, metavar="SETTING")
    parser.add_argument("--under", nargs="+", default=[], metavar="COMMAND", help="what to start Python with")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model, a multiple of 32")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps([_train(arguments, dtype, n) for n in arguments.threads for dtype in arguments.dtypes]))
        return
    for number, setting in enumerate(arguments.settings):
        found = _run(arguments, SETTINGS[setting])
        if not number:
            print(f"{found[0]['processor']}; {found[0]['libraries']}")
            heads = [f"{each['dtype']}, {each['threads']} thr." for each in found]
            print(f"{'':36}" + "".join(f"{head:22}" for head in heads))
        cells = [f"{each['digest'][:8]} {1e3 * each['step_s']:7.0f} ms" for each in found]
        print(f"{setting:36}" + "".join(f"{cell:22}" for cell in cells), flush=True)


def _run(arguments: argparse.Namespace, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Train in a process of its own under environment variables; return what it found."""
    own = [*arguments.under, sys.executable, __file__, "--one", "--steps", str(arguments.steps)]
    own += ["--hidden", str(arguments.hidden), "--threads", *map(str, arguments.threads), "--dtypes", *arguments.dtypes]
    done = subprocess.run(own, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _train(arguments: argparse.Namespace, dtype: str, threads: int) -> dict[str, Any]:
    """Train in this process; return the digest of its parameters and the time of a step."""
    import torch

    from odc_mpi.bench.train import configuration
    from odc_mpi.runtime.world import World
    from odc_mpi.train.run import train

    with World() as world, tempfile.TemporaryDirectory() as directory:
        config = configuration(world, None, print)
        small = {
            "hidden_size": arguments.hidden,
            "intermediate_size": 7 * arguments.hidden // 2,
            "num_hidden_layers": 2,
        }
        config = replace(
            config,
            model=replace(config.model, config={**(config.model.config or {}), **small}, param_dtype=cast(Any, dtype)),
            data=replace(config.data, minibatch_sequences=4),
            run=replace(config.run, exact=True, steps=arguments.steps, threads=threads, dir=directory),
        )
        summary = train(config, world)
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    told = torch.__config__.show()
    libraries = [line.strip(" -") for line in told.splitlines() if "Math Kernel" in line or "MKL-DNN" in line]
    return {
        "dtype": dtype,
        "threads": threads,
        "digest": summary["parameters_digest"],
        "step_s": min(line["step_s"] for line in lines),
        "processor": summary["arithmetic"]["processor"],
        "libraries": "; ".join(libraries),
    }


if __name__ == "__main__":
    main()
