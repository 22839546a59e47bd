"""The proof that a step's results equal those of one tower."""
