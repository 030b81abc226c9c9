"""Slurm batch scripts."""
