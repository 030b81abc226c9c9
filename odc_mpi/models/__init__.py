"""Models of transformers: built from a configuration or a directory, with weights that a rank reads in part."""
