"""Training with GRPO: settings, microbatch source, evaluation and metrics."""
