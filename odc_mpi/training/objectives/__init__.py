"""What a model is trained for: one file per objective."""
