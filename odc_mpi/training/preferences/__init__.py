"""Parts that recipes for preferences share: log-probabilities of answers, and training and evaluation on pairs."""
