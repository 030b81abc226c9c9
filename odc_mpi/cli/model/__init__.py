"""Commands for trained models: inspection and export of checkpoints, completions, conversations."""
