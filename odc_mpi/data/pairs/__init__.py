"""Pairs of a chosen and a rejected answer to one prompt, for training on preferences."""
