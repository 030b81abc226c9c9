"""Rollouts: sampling of completions, their rewards and advantages, and microbatches of them for training."""
