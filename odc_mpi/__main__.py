"""`python -m odc_mpi`, the same as the command `odc-mpi`."""

import sys

from odc_mpi.cli.main import main

sys.exit(main())
