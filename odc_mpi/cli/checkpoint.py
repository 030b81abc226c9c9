"""`odc-mpi checkpoint`: inspection and export of checkpoints, in one process."""

import argparse
from pathlib import Path

from odc_mpi.cli.options import BASE_HELP, add_out
from odc_mpi.errors import UserError

HELP = "list, verify, inspect and export checkpoints"

_ACTIONS = {
    "list": "list the checkpoints of a run",
    "verify": "compare all data with its checksums; exit code 1 if a checkpoint is damaged",
    "show": "print the tensors of the newest checkpoint, with shapes, types and norms",
    "digest": "print one SHA-256 over the tensors of the newest checkpoint, independent of the number of ranks",
    "export": "write the model as a Hugging Face directory with safetensors, adapters in the format of peft",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, help_text in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        action.add_argument("directory", metavar="DIR", type=Path, help="run directory, its checkpoints or one of them")
        if name == "export":
            add_out(action, "DIR", "NEW_DIR", "directory to create")
            action.add_argument(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                help="default: model.param_dtype; float32 for adapters",
            )
            action.add_argument("--merge", action="store_true", help="adapters: write the merged, full model")
            action.add_argument("--base", metavar="BASE", type=Path, help=BASE_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Run the action and return the exit code."""
    from odc_mpi.checkpoint import commands

    if arguments.action == "export":
        return _export(arguments)
    if arguments.action == "verify":
        lines, num_damaged = commands.verify(arguments.directory)
        print("\n".join(lines))
        return 1 if num_damaged else 0
    if arguments.action == "digest":
        print(commands.digest_line(arguments.directory))
    else:
        lines_of = commands.list_lines if arguments.action == "list" else commands.show_lines
        for line in lines_of(arguments.directory):
            print(line)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from odc_mpi.checkpoint.commands import open_newest_checkpoint
    from odc_mpi.checkpoint.export import Exporter, export
    from odc_mpi.hub import resolve_model_path
    from odc_mpi.models.exporters import AdapterExporter, FullModelExporter, MergedExporter

    if arguments.base is not None:
        arguments.base = Path(resolve_model_path(str(arguments.base), "--base"))
    with open_newest_checkpoint(arguments.directory) as checkpoint:
        exporter: Exporter
        if "adapter" in checkpoint.manifest.metadata:
            exporter = (MergedExporter if arguments.merge else AdapterExporter)(checkpoint, arguments.base)
        elif arguments.merge:
            raise UserError(f"--merge requires adapters, but {checkpoint.directory} is a full model: remove --merge")
        elif arguments.base:
            raise UserError(f"--base requires adapters, but {checkpoint.directory} is a full model: remove --base")
        else:
            exporter = FullModelExporter(checkpoint)
        names = export(checkpoint, arguments.out, exporter, arguments.dtype, base=arguments.base)
        print(f"exported step {checkpoint.step} to {arguments.out}: {', '.join(names)}")
    return 0
