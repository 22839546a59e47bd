"""What is proved of a step: that it gives what one tower gives."""
