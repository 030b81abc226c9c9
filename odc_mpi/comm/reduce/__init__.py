"""Addition of gradients to their owners' shards, either by MPI_Accumulate or by the owners from mailboxes."""
