"""Is this machine ready? What it has, whether its devices add up, what to mend."""
