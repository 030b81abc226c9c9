"""Startup of a job's processes: launchers, phases, and child processes."""
