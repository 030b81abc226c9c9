"""The supervisor of `odc-mpi run`, which starts the ranks, and starts them again after a failure. Does not use MPI."""
