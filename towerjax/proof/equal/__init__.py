"""The static proof that what towers give is what one tower gives."""
