"""The ranks of a job: how it starts, who waits for whom, and how it ends."""
