"""Reading JAX programs: equations, an interpreter, tags."""
