"""Steps: state, run, look, build; each room imports those before it."""
