"""Reward functions: finding, calling and guarding them. No torch."""
