"""Benchmarks that compare the runtime on this machine with MPI collectives, gloo, FSDP2 and plain PyTorch."""
