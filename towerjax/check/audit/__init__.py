"""The audit: run two towers and one tower of the same rows, and compare."""
