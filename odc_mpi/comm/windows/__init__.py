"""MPI windows in host and GPU memory, and the parameter store based on them."""
