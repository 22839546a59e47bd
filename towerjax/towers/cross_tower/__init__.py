"""What can be done with all towers' values outside a step?"""
