"""What builds a step of each kind: of a loss, an update, an evaluation."""
