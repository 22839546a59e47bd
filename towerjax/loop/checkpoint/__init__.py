"""Checkpoints of a training; each is complete or does not exist."""
