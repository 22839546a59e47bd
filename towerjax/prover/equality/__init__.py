"""The static proof that several towers give what one tower gives."""
