"""Generation: prompts in, completions out, by the model that is trained."""
