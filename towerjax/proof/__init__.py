"""Prove that values declared MIRRORED are the same on every tower, on any devices."""
