"""Generated mutants that change nothing, each with the reason."""

# The function and the change, as the score prints them: why nothing else comes of it.
SAME: dict[tuple[str, str], str] = {}
