"""Training steps of public programs, checked as they are."""
