"""The state of a step: how it is made, checked, and turned into the next one."""
