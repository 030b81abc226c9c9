"""Plans of minibatches: cost of sequences, balance over ranks, packing into microbatches, and split sequences."""
