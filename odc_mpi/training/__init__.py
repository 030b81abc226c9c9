"""Training runs: settings, the training loop, the run directory, checkpoints and resuming."""
