"""Transformers models built from a configuration, directory or checkpoint. Each rank reads only its weight slices."""
