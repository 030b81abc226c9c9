"""Prompts to generate from, with columns for rewards: their file, and how it is prepared."""
