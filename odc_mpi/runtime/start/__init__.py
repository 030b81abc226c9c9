"""How the processes of a job start, under which limits, and beside which others."""
