"""Probe of the MPI library: trials of its one-sided operations, a cache of the results, and the decision from them."""
