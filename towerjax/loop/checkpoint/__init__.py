"""Checkpoints of a run; each one is complete or does not exist."""
