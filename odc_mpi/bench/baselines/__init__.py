"""Baselines of the benchmarks: plain PyTorch, FSDP2 over gloo, and the runtime over MPI collectives."""
