"""Reports on runs and benchmarks: HTML pages with plots, and tables for terminals. Does not use MPI."""
