"""Sharding of a torch module: every rank owns a shard of its parameters, gradients and optimizer states."""
