"""Reports on runs and simulations: HTML pages with plots, and tables for terminals. Does not use MPI."""
