"""Preparation of text as HDF5 data sets, and planning and loading of minibatches.

This package does not use MPI. Ranks and numbers of ranks are plain integers, and every rank computes the same plan.
"""
