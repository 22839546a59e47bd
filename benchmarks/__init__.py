"""Scripts that measure the project's own figures: ``python -m benchmarks.overhead``."""
