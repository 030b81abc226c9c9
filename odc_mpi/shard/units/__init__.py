"""Units (groups of parameters that are fetched together) and the cache of unsharded units."""
