"""Turn a plan into a program that runs: trace, prove, compile, call."""
