"""Log-probabilities of tokens, in blocks of the head."""
