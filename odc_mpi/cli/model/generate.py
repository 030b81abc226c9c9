"""`odc-mpi generate`: initialize the ranks and complete prompts."""

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from odc_mpi.cli.options import BASE_HELP, as_path, attention_name, positive_int, utf8
from odc_mpi.runtime.ranks import gc_paused, mpi_startup, run_on_all_ranks
from odc_mpi.runtime.start.launch import launched_rank

HELP = "complete prompts with a run, a checkpoint or a Hugging Face model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi generate`."""
    parser.description = "Complete prompts with a model. Under mpiexec its parameters are sharded over the ranks."
    add_model(parser, max_new_tokens=128)
    parser.add_argument("--prompt", type=utf8, metavar="TEXT", help="text to complete, without the chat template")
    parser.add_argument(
        "--chat", type=utf8, action="append", metavar="TEXT", help="question to answer; give it again for more"
    )
    parser.add_argument("--prompts", metavar="FILE", type=as_path, help="JSONL or Parquet: prompt or messages per row")
    parser.add_argument("--out", type=as_path, metavar="FILE.jsonl", help="JSONL to write; default: print the text")
    parser.add_argument(
        "--batch-size",
        type=positive_int,
        default=32,
        metavar="N",
        help="prompts that a rank decodes at once; default: 32",
    )
    parser.add_argument(
        "--timeout-s", type=positive_int, default=3600, metavar="S", help="longest wait for another rank; default: 3600"
    )


def add_model(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add the options shared by `generate` and `chat`. `max_new_tokens` is the default of `--max-new-tokens`."""
    help_text = "run, checkpoint, Hugging Face or peft directory, or name on the hub"
    parser.add_argument("source", metavar="SOURCE", type=as_path, help=help_text)
    parser.add_argument("--step", metavar="N", help="checkpoint of a run: its step, or best; default: the newest")
    length = f"default: {max_new_tokens}"
    parser.add_argument("--max-new-tokens", type=positive_int, default=max_new_tokens, metavar="N", help=length)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy decoding")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus threshold in (0, 1]; default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="sampling seed; default: 0")
    parser.add_argument(
        "--tokenizer", type=as_path, metavar="DIR", help="directory, data set or name on the hub; default: of SOURCE"
    )
    parser.add_argument("--base", metavar="DIR", type=as_path, help=BASE_HELP)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the ranks; default: cpu")
    help_text = "default: that of the run, else sdpa"
    parser.add_argument("--attn-implementation", type=attention_name, metavar="{sdpa,eager}", help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Complete the prompts and return the exit code. Collective."""
    return start(arguments, lambda module, job, world: module.generate_all(job, world))


def start(arguments: argparse.Namespace, work: Callable[[Any, Any, Any], object]) -> int:
    """Initialize MPI, call `work` on all ranks, and return the command's exit code. Collective.

    The arguments of `work` are the module `generation.run`, the `GenerateArguments`, and the `World`.
    """
    from odc_mpi.observe.rank_log import RankLog

    with RankLog(launched_rank()) as log:
        # Imported before MPI starts: if an import failed later, the other ranks would wait for this rank.
        with gc_paused():
            from odc_mpi.generation.generate import SamplingParams
        sampling = SamplingParams(arguments.max_new_tokens, arguments.temperature, arguments.top_p, arguments.seed)
        with mpi_startup():
            from odc_mpi.generation.load import GenerateArguments
            from odc_mpi.runtime.world import World

        names = {field.name for field in fields(GenerateArguments)} & vars(arguments).keys()
        job = GenerateArguments(sampling=sampling, **{name: getattr(arguments, name) for name in names})
        world = World(timeout_s=arguments.timeout_s, limit="--timeout-s")

        def log_and_work() -> None:
            world.run_on_all(lambda: log.open(None, world))
            from odc_mpi.generation import run as module

            work(module, job, world)

        return run_on_all_ranks(world, log_and_work)
