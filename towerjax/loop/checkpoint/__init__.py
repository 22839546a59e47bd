"""How does a training outlive its process? Checkpoints that are whole, or not there."""
