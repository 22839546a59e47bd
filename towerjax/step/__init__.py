"""The engine, which makes one step of towers and an update, and its builders."""
