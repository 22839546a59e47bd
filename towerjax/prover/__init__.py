"""The prover reads any JAX program: which values are replicated, which are equal."""
