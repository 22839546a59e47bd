"""How JAX programs are read: equations, an interpreter, tags."""
