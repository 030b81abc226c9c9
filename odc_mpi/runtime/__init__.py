"""The ranks of a job: start, topology, deadlines of waits, and shutdown."""
