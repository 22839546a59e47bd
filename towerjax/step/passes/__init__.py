"""How a device runs a pass of towers."""
