"""Training from rewards: its settings, its minibatches of prompts, its evaluation, its records."""
