"""Public programs as they are published, and written with towerjax."""
