"""Training objectives, one per module."""
