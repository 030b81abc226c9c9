"""Checkpoints in HDF5, with one file per rank, an index of full tensors, and a manifest. This package uses no MPI."""
