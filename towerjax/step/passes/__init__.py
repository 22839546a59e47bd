"""Passes: how a device runs all of its towers once and merges their results."""
