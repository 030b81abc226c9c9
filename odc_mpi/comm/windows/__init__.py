"""MPI windows on host memory and on GPUs, and the parameter store over them."""
