"""Reports on a step's compiled program."""
