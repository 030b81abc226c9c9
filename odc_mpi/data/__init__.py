"""Data: preparing text as HDF5 data sets, and planning and loading minibatches from them.

Does not use MPI. Ranks and sizes are plain integers, and every rank computes the same plan independently.
"""
