"""`odc-mpi train --dry-run`: reports what a run would need and do, without training."""
