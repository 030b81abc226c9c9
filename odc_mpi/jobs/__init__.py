"""Batch scripts of schedulers."""
