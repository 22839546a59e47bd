"""Walk two programs side by side, equation by equation."""
