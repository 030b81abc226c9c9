"""Search for the origin of values that are not finite."""
