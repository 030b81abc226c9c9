"""Planning minibatches: estimating costs, balancing ranks, packing microbatches, and splitting sequences."""
