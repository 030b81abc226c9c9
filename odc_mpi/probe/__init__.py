"""Probe of the MPI library: trials of one-sided operations, a cache of results, and decisions based on the results."""
