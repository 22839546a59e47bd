"""What the proof of equality knows of a value: its kind."""
