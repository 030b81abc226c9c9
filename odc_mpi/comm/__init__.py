"""Moving bytes between ranks: the transport, its buffers, tickets, and the progress thread."""
