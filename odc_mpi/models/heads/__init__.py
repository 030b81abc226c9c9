"""Heads of models: what a model predicts, and the scores of a reward model."""
