"""Output of a run: metrics, progress on the terminal, a trace, trackers, and a log file of each rank."""
