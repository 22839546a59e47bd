"""Checkpoints of a training, each of which is whole or not there."""
