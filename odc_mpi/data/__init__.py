"""From text to microbatches: tokens on disk, what a sequence costs, who computes which, and the loader.

Nothing in this room knows MPI: ranks and sizes are plain integers, and every rank computes the same plan by itself.
"""
