"""Pairs of a chosen and a rejected answer to the same prompt, for training on preferences."""
