"""Sweeps: a grid of configurations, their trainings, a file of results, a table."""
