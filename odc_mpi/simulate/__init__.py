"""Schedules simulated by discrete events. No MPI."""
