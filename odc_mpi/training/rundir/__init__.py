"""Run directory: its files, its lock, checkpoints and resuming."""
