"""From passes of towers to a program that runs."""
