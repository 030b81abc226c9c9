"""Startup of a job's processes: launchers, time limits, and child processes."""
