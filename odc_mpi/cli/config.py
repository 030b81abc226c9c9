"""`odc-mpi config`: print all settings of a configuration with their values and sources. Does not use MPI."""

import argparse

from odc_mpi.cli.options import as_path, require_config

HELP = "print all settings of a configuration, and where each comes from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi config`."""
    parser.usage = "odc-mpi config CONFIG [--SECTION.KEY VALUE ...]"
    parser.description = "Print each setting, its value, and its source: default, auto, CONFIG or the command line."
    parser.add_argument("config", type=as_path, metavar="CONFIG", help="YAML file")


def run(arguments: argparse.Namespace) -> int:
    """Print each setting with its value and the source of the value, and return the exit code."""
    from odc_mpi.training import settings

    require_config(arguments)
    for line in settings.describe(arguments.config, arguments.overrides):
        print(line)
    return 0
