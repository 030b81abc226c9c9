"""Addition of gradients to the shards of their owners, by MPI_Accumulate or by the owners from mailboxes."""
