"""Adding gradients into the memory of their owners: MPI accumulates, or the owner adds what mailboxes bring."""
