"""Objectives, one per file."""
