"""Training runs: settings, the loop, run directories, resuming and saving."""
