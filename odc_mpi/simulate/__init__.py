"""Simulation of schedules by discrete events. Does not use MPI."""
