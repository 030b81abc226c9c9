"""Training on islands of ranks: settings, and DiLoCo on islands that train apart."""
