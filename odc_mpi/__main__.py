"""`python -m odc_mpi` is `odc-mpi`."""

import sys

from odc_mpi.cli.main import main

sys.exit(main())
