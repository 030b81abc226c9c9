"""GRPO: settings, rollouts as microbatches, evaluation and metrics."""
