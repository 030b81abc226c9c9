"""Start of the processes of a job: launchers, time limits, and child processes."""
