"""Heads of models: prediction tasks, and the scores of a reward model."""
