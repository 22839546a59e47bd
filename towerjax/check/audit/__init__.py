"""The audit: run two towers and one tower on the same rows, and compare."""
