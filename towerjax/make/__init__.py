"""Builders of each kind of step: for training, for evaluation, for predictions."""
