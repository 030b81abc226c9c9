"""A torch module as shards."""
