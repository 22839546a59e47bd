"""What we know of JAX's programs: equations, an interpreter, tags."""
