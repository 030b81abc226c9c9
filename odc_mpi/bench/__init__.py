"""Benchmarks that compare odc_mpi with MPI collectives, FSDP2 and plain PyTorch on this machine."""
