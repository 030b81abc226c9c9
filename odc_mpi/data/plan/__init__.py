"""Plans of minibatches: costs of sequences, balance over ranks, packing into microbatches, and split sequences."""
