"""Log-probabilities of tokens. Logits are computed in blocks of positions."""
