"""Training with GRPO: settings, source of microbatches, evaluation and metrics."""
