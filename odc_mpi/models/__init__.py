"""Transformers models from a configuration, a directory or a checkpoint. Each rank reads only its weight slices."""
