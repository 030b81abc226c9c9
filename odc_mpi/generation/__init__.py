"""Commands `odc-mpi generate` and `odc-mpi chat`: completions of prompts by a model on disk, on one or more ranks."""
