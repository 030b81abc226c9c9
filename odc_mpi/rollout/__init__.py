"""Rollouts: sampling of completions, and their rewards and advantages."""
