"""Search for the origin of non-finite values."""
