"""Units of parameters, and the cache of unsharded units."""
