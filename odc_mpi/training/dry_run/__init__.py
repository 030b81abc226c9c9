"""`odc-mpi train --dry-run`: what a run would need and do, without training and without writing files."""
