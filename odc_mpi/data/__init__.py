"""Preparing text as HDF5 data sets, and planning and loading minibatches.

This package does not use MPI: ranks and numbers of ranks are plain integers, and every rank computes the same plan.
"""
