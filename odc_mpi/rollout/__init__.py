"""Rollouts: sampling of completions, their rewards and advantages, and packing of completions into microbatches."""
