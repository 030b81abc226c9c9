"""The abilities of this MPI library: trials of its operations, the decision that follows from them, and a cache."""
