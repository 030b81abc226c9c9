"""Benchmarks that compare odc_mpi on this machine with MPI collectives, gloo, FSDP2 and plain PyTorch."""
