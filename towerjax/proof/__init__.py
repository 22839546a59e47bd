"""Prove that what is declared MIRRORED is the same on every tower, on any devices."""
