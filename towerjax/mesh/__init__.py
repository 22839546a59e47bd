"""Where are towers and values? Devices, placement, processes."""
