"""Seeded bugs, and whether the suite finds them. See README.md."""
