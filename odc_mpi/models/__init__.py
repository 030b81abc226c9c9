"""Models of transformers: built from a configuration or a directory; each rank reads only its slices of the weights."""
