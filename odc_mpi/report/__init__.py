"""HTML reports with plots of runs and benchmarks. This package does not use MPI."""
