"""Rollouts to learn from: groups of completions with their rewards, as microbatches."""
