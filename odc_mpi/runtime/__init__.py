"""Ranks of a job: startup, topology, deadlines for waits, and shutdown."""
