"""What ranks that share a sequence exchange: keys and values of its pieces, and their gradients."""
