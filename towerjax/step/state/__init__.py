"""The state of a step, its checks, and its next state."""
