"""Preference optimization (`run.objective: dpo`): settings, reference log-probabilities and evaluation."""
