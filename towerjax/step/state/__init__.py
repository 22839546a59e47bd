"""What a step keeps, and what becomes of it."""
