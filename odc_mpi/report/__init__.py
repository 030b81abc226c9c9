"""Pages with pictures of runs and benchmarks. No MPI."""
