"""Parts that the recipes for completions of prompts share: settings, prompts, rollouts and their metrics."""
