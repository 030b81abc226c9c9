"""Log-probabilities of tokens. The logits are computed in blocks of positions."""
