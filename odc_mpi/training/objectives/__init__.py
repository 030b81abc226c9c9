"""Training objectives: supervised fine-tuning, DPO, reward models and GRPO."""
