"""Commands for trained models: inspect and export checkpoints, complete prompts, and chat."""
