"""Checks that a JAX program gives the same results on any number of devices."""
