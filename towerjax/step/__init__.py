"""How do towers and an update become one step? The engine, and the builders on it."""
