"""Where things go: pure plans for devices, layouts, packing and resharding. No torch."""
