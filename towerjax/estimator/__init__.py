"""How is one model function trained, evaluated and served on all devices?"""
