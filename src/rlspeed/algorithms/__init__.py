"""Pure tensor functions of the algorithms."""
