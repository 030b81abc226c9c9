"""HDF5 checkpoints, with one file per rank, an index of full tensors, and a manifest. This package does not use MPI."""
