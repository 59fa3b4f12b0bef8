"""Hugging Face configs to policy, value and reward models."""
