"""`python -m odc_mpi` is `odc-mpi`."""

import sys

from odc_mpi.cli import main

sys.exit(main())
