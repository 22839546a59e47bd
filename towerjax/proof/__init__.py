"""Prove from programs that values are the same on all towers, and as on one tower."""
