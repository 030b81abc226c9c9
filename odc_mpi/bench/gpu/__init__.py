"""`odc-mpi bench gpu`: units, kernels and steps on GPUs."""
