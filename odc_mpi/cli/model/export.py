"""`odc-mpi export`: export a run as a Hugging Face directory, in a single process."""

import argparse
from pathlib import Path

from odc_mpi.cli.options import BASE_HELP, as_path, output

HELP = "write the model as a Hugging Face directory with safetensors, adapters in the format of peft"
DIRECTORY_HELP = "run directory, its checkpoints or one of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi export`."""
    parser.description = HELP
    parser.add_argument("directory", metavar="DIR", type=as_path, help=DIRECTORY_HELP)
    parser.add_argument("--out", type=output, required=True, metavar="NEW_DIR", help="directory to create")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: model.param_dtype; float32 for adapters"
    )
    parser.add_argument("--merge", action="store_true", help="adapters: write the merged, full model")
    parser.add_argument("--base", metavar="BASE", type=as_path, help=BASE_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Export the newest checkpoint, print its step and the names of the written files, and return the exit code."""
    from odc_mpi.checkpoint.commands import open_newest_checkpoint
    from odc_mpi.hub import resolve_model_path
    from odc_mpi.models.export import export

    base = None if arguments.base is None else Path(resolve_model_path(str(arguments.base), "--base"))
    with open_newest_checkpoint(arguments.directory) as checkpoint:
        names = export(checkpoint, arguments.out, merge=arguments.merge, dtype=arguments.dtype, base=base)
        print(f"exported step {checkpoint.manifest.step} to {arguments.out}: {', '.join(names)}")
    return 0
