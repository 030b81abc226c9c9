"""Settings for training on islands of ranks."""
