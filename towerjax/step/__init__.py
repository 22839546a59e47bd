"""The training step: its state, its passes of towers, how it is run, and `Step`."""
