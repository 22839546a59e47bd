"""The report on a compiled program: collectives, FLOPs, memory and times."""
