"""Rollouts: sampled completions of prompts, their rewards and advantages, and microbatches to train on."""
