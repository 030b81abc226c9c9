"""Training runs: settings, training loop, run directory, checkpoints and resuming."""
