"""Hybrid sharding: islands of ranks that each hold all parameters, and the exchange between them."""
