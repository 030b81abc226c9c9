"""Attention kernels for packed sequences."""
