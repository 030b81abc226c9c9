"""Training on islands of ranks: settings, outer loop, and checkpoints."""
