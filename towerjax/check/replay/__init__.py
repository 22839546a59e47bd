"""Run a step's towers on other devices too, and compare bits."""
