"""The first proof: a value that is declared replicated is the same on all towers."""
