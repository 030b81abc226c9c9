"""Sharding of a torch module, so that every rank owns a shard of its parameters, gradients and optimizer states."""
