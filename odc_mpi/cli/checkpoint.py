"""`odc-mpi checkpoint`: its options and its run. One process."""

import argparse
from pathlib import Path

from odc_mpi.cli.options import BASE_HELP
from odc_mpi.errors import UserError

HELP = "look into checkpoints, export them"

_ACTIONS = {
    "list": "the checkpoints of a run",
    "verify": "read every byte and compare it with its checksum; exit code 1 if one is not intact",
    "show": "the tensors of the newest checkpoint, with shapes, types and norms",
    "digest": "one SHA-256 over the tensors of the newest, the same whatever the number of ranks",
    "export": "write the model as a Hugging Face directory with safetensors; adapters as peft loads them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, help_text in _ACTIONS.items():
        action = actions.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        action.add_argument("directory", metavar="DIR", type=Path, help="a run, its checkpoints, or one of them")
        if name == "export":
            action.add_argument("out", metavar="OUT", type=Path, help="the directory to write; a new one")
            action.add_argument(
                "--dtype",
                choices=("float32", "bfloat16", "float16"),
                help="default: model.param_dtype; of adapters float32",
            )
            action.add_argument(
                "--merge", action="store_true", help="adapters: write the whole model, the adapters added to their base"
            )
            action.add_argument("--base", metavar="BASE", type=Path, help=BASE_HELP)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say, and return the exit code.

    Raises:
        UserError: There is no checkpoint, it is damaged, or something cannot be written.
    """
    from odc_mpi.checkpoint import commands

    if arguments.action == "export":
        return _export(arguments)
    if arguments.action == "verify":
        lines, num_damaged = commands.verify(arguments.directory)
        print("\n".join(lines))
        return 1 if num_damaged else 0
    if arguments.action == "digest":
        print(commands.digest_line(arguments.directory))
        return 0
    for line in {"list": commands.list_lines, "show": commands.show_lines}[arguments.action](arguments.directory):
        print(line)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from odc_mpi.checkpoint.commands import open_newest
    from odc_mpi.checkpoint.export import export

    with open_newest(arguments.directory) as checkpoint:
        exporter = None
        if "adapter" in checkpoint.manifest.metadata:
            from odc_mpi.models.exporters import AdapterExporter, MergedExporter

            exporter = (MergedExporter if arguments.merge else AdapterExporter)(checkpoint, arguments.base)
        elif arguments.merge:
            raise UserError(f"--merge is for adapters, {checkpoint.directory} holds a whole model: leave --merge out")
        elif arguments.base:
            raise UserError(f"--base goes with adapters, {checkpoint.directory} holds a whole model: leave --base out")
        names = export(checkpoint, arguments.out, arguments.dtype, exporter=exporter, base=arguments.base)
        print(f"exported step {checkpoint.step} to {arguments.out}: {', '.join(names)}")
    return 0
