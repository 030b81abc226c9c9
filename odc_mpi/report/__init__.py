"""HTML reports on runs and benchmarks, with plots. This package does not use MPI."""
