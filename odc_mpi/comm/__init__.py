"""Everything that knows MPI."""
