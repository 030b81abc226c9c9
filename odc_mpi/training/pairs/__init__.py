"""Training on pairs of a chosen and a rejected answer: DPO and reward models."""
