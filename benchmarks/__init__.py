"""Where do our own numbers come from? Scripts: ``python -m benchmarks.overhead``."""
