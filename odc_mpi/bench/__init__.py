"""Benchmarks of the runtime on this machine, compared with alternatives: MPI collectives, gloo, FSDP2, plain torch."""
