"""Baselines for the benchmarks: plain PyTorch, FSDP2 over gloo, and odc_mpi models over MPI collectives."""
