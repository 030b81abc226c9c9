"""`odc-mpi doctor`: its options and its run. The probe and its tables are in the room `stack`."""

import argparse

HELP = "what this MPI stack really does; under mpiexec on all its ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = "Try the one-sided operations, and say what a run will therefore use."
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Probe the MPI stack, and return the exit code. Collective, in the children of this process."""
    from odc_mpi.probe.doctor import doctor

    return doctor(arguments.json)
