"""The run directory: its files, its lock, checkpoints and resuming."""
