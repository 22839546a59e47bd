"""The rules of equations that run a program: calls, branches, loops and maps."""
