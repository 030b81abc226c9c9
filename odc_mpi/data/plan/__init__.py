"""Plans of a minibatch: the cost of sequences, their balance over ranks, and cutting into microbatches."""
