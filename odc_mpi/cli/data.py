"""`odc-mpi data`: verify data sets in a single process."""

import argparse

from odc_mpi.cli.options import as_path
from odc_mpi.errors import UserError
from odc_mpi.runtime.ranks import print_error

HELP = "verify data sets"
_VERIFY_HELP = "compare all data with its checksums, and load the tokenizer; exit code 2 if a file is damaged"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the `verify` action and its arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help=_VERIFY_HELP, description=_VERIFY_HELP, allow_abbrev=False)
    verify.add_argument("paths", metavar="FILE", nargs="+", type=as_path, help="data set of odc-mpi prepare")


def run(arguments: argparse.Namespace) -> int:
    """Verify data sets and print one line per file. Return 2 if any file is damaged or not a data set, otherwise 0."""
    from odc_mpi.data.dataset.reader import verify_dataset
    from odc_mpi.data.tokenizer import load_tokenizer, tokenizer_files

    code = 0
    for path in arguments.paths:
        try:
            line = verify_dataset(path)
            if tokenizer_files(path):
                load_tokenizer(path, "the data set")
            print(line, flush=True)
        except UserError as error:
            print_error(error)
            code = 2
    return code
