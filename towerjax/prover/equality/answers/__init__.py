"""What the proof says of a result: proved, refuted or unknown, and why."""
