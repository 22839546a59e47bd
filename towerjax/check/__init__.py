"""What is asked of a step or any program: the same on all towers, and on one."""
