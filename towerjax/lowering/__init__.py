"""Lower a proved program of one tower to one program for these devices."""
