"""Benchmarks that compare odc_mpi with MPI collectives, gloo, FSDP2 and plain PyTorch on this machine."""
