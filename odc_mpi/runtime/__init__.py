"""The ranks of a job: start, topology, deadlines of all waits, and end."""
