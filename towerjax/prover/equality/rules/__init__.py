"""The rules of single equations, by subject."""
