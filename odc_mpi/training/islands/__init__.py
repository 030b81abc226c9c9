"""Training on islands of ranks: settings."""
