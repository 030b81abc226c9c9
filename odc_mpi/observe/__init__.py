"""Output of a run: metrics, progress on the terminal, a timeline of all ranks, trackers, and a log file per rank."""
