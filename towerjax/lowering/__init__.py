"""One program for these devices: what is proved is what is lowered."""
