"""Probe of the MPI library: trials of one-sided operations, a cache for the results, and decisions based on them."""
