"""Who computes which sequences of a minibatch: what a sequence costs, balancing, cutting into microbatches."""
