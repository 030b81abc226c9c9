"""Checkpoints in HDF5: a file per rank, an index that shows whole tensors, a manifest. No communication."""
