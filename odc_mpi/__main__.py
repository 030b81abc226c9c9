"""Entry point for `python -m odc_mpi`, which is equivalent to the command `odc-mpi`."""

import sys

from odc_mpi.cli.main import main

sys.exit(main())
