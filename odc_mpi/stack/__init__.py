"""What this MPI library can do: trials of its operations, what a run decides by them, and the cache of both."""
