"""Context parallelism: exchange of keys, values and their gradients between the ranks of a split sequence."""
