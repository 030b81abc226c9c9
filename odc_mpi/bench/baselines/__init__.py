"""Baselines of the benchmarks: plain torch, FSDP2 over gloo, and the runtime over MPI collectives."""
