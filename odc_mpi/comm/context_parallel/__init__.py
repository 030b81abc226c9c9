"""Context parallelism: exchange of keys, values and their gradients between ranks that share a sequence."""
