"""Planning of minibatches: costs of sequences, balance of ranks, packing into microbatches, and splitting sequences."""
