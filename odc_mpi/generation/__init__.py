"""What `odc-mpi generate` does: completions of prompts by a model on disk, on one rank or many."""
