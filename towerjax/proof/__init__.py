"""Is everything that is declared MIRRORED the same on every tower, on any devices?"""
