"""Any JAX program: whether it gives the same on each device and on any number."""
