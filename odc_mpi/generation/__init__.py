"""The commands `odc-mpi generate`, on one or more ranks, and `odc-mpi chat`, in one process."""
