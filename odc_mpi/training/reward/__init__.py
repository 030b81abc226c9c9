"""Reward models (`run.objective: reward`): settings, training objective and evaluation."""
