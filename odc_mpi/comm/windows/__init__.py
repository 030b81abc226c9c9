"""MPI windows: on host memory and on GPUs, and the transport over them."""
