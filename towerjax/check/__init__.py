"""Checks that a program computes the same on all devices as on one."""
