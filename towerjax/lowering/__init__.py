"""Lowering a proved program to one program for these devices."""
