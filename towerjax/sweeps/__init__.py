"""Sweeps of a grid, which train or time: one file of results, one table."""
