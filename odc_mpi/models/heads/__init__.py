"""Model heads: prediction tasks, and the scores of reward models."""
