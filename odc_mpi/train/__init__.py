"""Training runs: configuration, models, the loop, and what a run tells about itself."""
