"""Discrete-event simulation of schedules. Does not use MPI."""
