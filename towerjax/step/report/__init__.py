"""What did the compiler make of a step? Its collectives, memory and work."""
