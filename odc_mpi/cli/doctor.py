"""`odc-mpi doctor`: probe the MPI library. `odc_mpi.probe` implements the probe and prints the results."""

import argparse

HELP = "probe the MPI library and show the settings a run will use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `odc-mpi doctor`."""
    parser.description = "Test the one-sided operations of the MPI library and print the settings that a run will use."
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Probe the MPI library in a child process of each rank, and return the exit code. Collective."""
    from odc_mpi.probe.doctor import doctor

    return doctor(arguments.json)
