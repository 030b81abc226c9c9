"""Training on islands that rarely synchronize: fragments, their encodings, the outer optimizer, rules on norms."""
