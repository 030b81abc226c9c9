"""Chat templates: rendering conversations, finding answers and their ends, and checking what a template drops."""
