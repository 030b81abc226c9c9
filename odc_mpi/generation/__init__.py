"""`odc-mpi generate`: completions of prompts by a model on disk, on one or several ranks."""
