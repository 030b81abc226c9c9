"""Models of transformers, built from a configuration or a directory. Each rank reads only its slices of the weights."""
